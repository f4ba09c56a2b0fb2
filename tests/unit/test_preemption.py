"""Agreement on the step at which all ranks leave, and what becomes of signals."""

import json
import signal
from itertools import pairwise

import numpy as np
import pytest

from distopt.checkpoint import Checkpoint, Preempted, preemption
from distopt.checkpoint.preemption import Preemption
from distopt.comm.single import SingleCommunicator
from distopt.errors import UsageError
from distopt.launch.job.topology import Topology
from tests.unit.refusals import refused
from tests.unit.threads import in_threads


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in preemption.PREEMPTION_SIGNALS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


class TwoRanks(SingleCommunicator):
    """The other rank sends what the test says."""

    def __init__(self):
        super().__init__(Topology.of_one_host(0, 1, "here"))
        self.other, self.exchanges = (0, 0.0), 0

    def all_gather_bytes(self, payload, *, label):
        assert label == "checkpoint"
        self.exchanges += 1
        asks_for_signals = isinstance(json.loads(payload), list)
        return [payload, json.dumps(self.other if asks_for_signals else "").encode()]


@pytest.mark.parametrize(("mine", "theirs", "expected"), [(0.001, 0.004, 250), (0.3, 0.1, 3), (5.0, 0.01, 1)])
def test_ranks_exchange_once_a_second_of_the_slowest(monkeypatch, handlers, mine, theirs, expected):
    ranks, now = TwoRanks(), 100.0
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now)
    leaving = Preemption(ranks)
    distances, steps = [], 0
    for _ in range(4 * 250 + 300):
        now += mine
        steps += 1
        ranks.other = (0, theirs * steps)
        before = ranks.exchanges
        assert leaving.due() == 0
        if ranks.exchanges > before:
            distances.append(steps)
            steps = 0
    assert distances[0] == 1
    assert all(b <= 2 * a for a, b in pairwise(distances))
    assert distances[-1] == pytest.approx(expected, abs=1)
    ranks.other, leaving = (signal.SIGUSR1, 0.0), Preemption(ranks)
    assert leaving.due() == signal.SIGUSR1, "that of another rank"


def resumed(folder) -> Checkpoint:
    made = Checkpoint(folder, preemptible=True, sums=np.zeros(3))
    made.resume()
    return made


def test_step_saves_and_leaves(tmp_path, handlers, monkeypatch, caplog):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    saving = resumed(tmp_path)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Preempted) as left:
        saving.step(3)
    assert left.value.code == 128 + signal.SIGTERM
    text = f"SIGTERM: the job leaves after step 1, saved in {tmp_path}; start it again to resume from there"
    assert caplog.messages == [text]
    signal.raise_signal(signal.SIGTERM)  # has no effect any more
    other = resumed(tmp_path)
    assert (other.steps, other.epoch) == (1, 3)


def test_handler_of_the_launcher_that_requeues_is_called_after_the_save(tmp_path, handlers, monkeypatch, caplog):
    """As submitit's: it asks Slurm itself, and then ends its process."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    found = []

    def of_launcher(number, _):
        found.append((number, [path.name for path in tmp_path.glob("step-*")]))
        raise SystemExit(-1)

    signal.signal(signal.SIGUSR2, of_launcher)
    saving = resumed(tmp_path)
    signal.raise_signal(signal.SIGUSR2)
    assert not found
    with pytest.raises(Preempted) as left:
        saving.step()
    assert left.value.code == 0
    assert found == [(signal.SIGUSR2, ["step-0000000001"])]
    assert caplog.messages[-1].endswith("; it will be started again")


def test_signals_have_their_earlier_effect_after_close(tmp_path, handlers):
    caught = []
    signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))
    with resumed(tmp_path) as saving:
        saving.step()
        signal.raise_signal(signal.SIGUSR1)  # too late for a step
        assert not caught
    assert caught == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]


def test_nothing_is_caught_without_a_folder_the_option_or_in_another_thread(tmp_path, handlers):
    for folder, options in ((None, {"preemptible": True}), (tmp_path, {})):
        with Checkpoint(folder, sums=np.zeros(3), **options) as saving:
            saving.resume()
            assert {number: signal.getsignal(number) for number in handlers} == handlers
    error = "only the main thread gets; call resume there"
    in_threads(lambda: refused(UsageError, error, resumed, tmp_path / "new"))
    assert not (tmp_path / "new").exists()
