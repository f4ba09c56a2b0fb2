"""States that ranks keep in memory of their agent: whole after any kill, and as they were."""

import io
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from distopt.checkpoint import Checkpoint, load
from distopt.checkpoint.adapters import InPlace, State
from distopt.checkpoint.folder import list_checkpoints
from distopt.checkpoint.memory import Memory
from distopt.checkpoint.state_files import Held, Label, States
from distopt.data import ShardedSampler
from distopt.launch.end_together.report import supervisor
from distopt.launch.heal.state_slots import POST, TO_SEND, VALID, VARIABLE, StateSlots
from distopt.launch.job.topology import Topology
from tests.conformance import thread_ranks
from tests.conformance.thread_ranks import OracleCommunicator

NODES = ["0", "0", "1"]  # of three ranks


def together(size: int, payloads: dict[int, bytes]) -> Any:
    """Rank 0 of so many; what the others say, if not the same, is there when it is asked for."""

    def all_gather_bytes(payload: bytes, *, label: str) -> list[bytes]:
        assert label == "checkpoint"
        return [payloads.get(rank, payload) for rank in range(size)]

    return SimpleNamespace(topology=Topology.of_one_host(0, size, "host"), all_gather_bytes=all_gather_bytes)


class Shared(InPlace):
    def shared(self, names):
        return set(names)


@pytest.fixture
def slots(monkeypatch):
    for name, value in {"GROUP_RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    slots = StateSlots(1)
    yield slots
    slots.close()


def memory_of(slots: StateSlots, monkeypatch: pytest.MonkeyPatch, size: int = 1, payloads: Any = None) -> Memory:
    monkeypatch.setenv(VARIABLE, slots.variable[VARIABLE])
    monkeypatch.setenv("WORLD_SIZE", str(size))
    memory = Memory.of_agent(together(size, payloads or {}))
    assert memory is not None
    return memory


def test_only_one_checkpoint_of_all_ranks_gets_the_slots(slots, monkeypatch):
    memory_of(slots, monkeypatch)
    for more in ({}, {VARIABLE: slots.variable[VARIABLE], "WORLD_SIZE": "2"}):
        for name, value in more.items():
            monkeypatch.setenv(name, value)
        assert Memory.of_agent(together(1, {})) is None


def assert_equal_arrays(found, expected, prefix: str = "") -> None:
    """Also in their types; names of those that are found begin with the prefix."""
    assert found.keys() == {prefix + key for key in expected}
    for key, array in expected.items():
        assert (found[prefix + key].dtype, found[prefix + key].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[prefix + key], array)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 1, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, np.bool_])
def test_what_is_kept_is_what_is_read(shape, dtype):
    numbers = np.random.default_rng(len(shape))
    arrays = {f"{name}/x": np.asarray(9 * numbers.standard_normal(shape)).astype(dtype) for name in "ab"}
    kept = States(Held(Label(0, 3, 2, 1), (5, 3), {"end": True}, "record"), arrays, {"a": {"notes": [1, None, "x"]}})
    file = io.BytesIO()
    kept.write(file)
    back = States.read(file.getvalue())
    assert (back.held, back.notes) == (kept.held, kept.notes)
    assert_equal_arrays(back.arrays, arrays)


def test_states_are_files_of_safetensors_which_grow_and_the_newest_is_gone_on_from(slots, monkeypatch):
    memory = memory_of(slots, monkeypatch)
    assert (memory.agree(), slots.steps) == (None, [0])
    arrays = {"w": np.zeros(3), "v": np.zeros((2, 2), np.float32)}
    for step in range(1, 4):
        arrays["w"] = np.full(3 * 10**step, float(step))
        arrays["v"][...] = -step
        memory.due(step)
        memory.keep(step, step // 2, {"own": InPlace(arrays), "all": Shared(arrays)})
        assert slots.steps == [step]
        for prefix, fds in (("own/own/", slots.fds.own), ("shared/all/", slots.fds.shared)):
            kept = [safetensors.numpy.load_file(f"/proc/self/fd/{fd}") for fd in fds[0] if os.fstat(fd).st_size]
            assert_equal_arrays(max(kept, key=lambda found: found[f"{prefix}w"][0]), arrays, prefix)
    again = memory_of(slots, monkeypatch)
    label, said = again.agree(), []
    assert label == Label(0, 3, 1, 1)
    monkeypatch.setattr(supervisor, "send", lambda what, **content: said.append((what, content)))
    for step in (4, 5):
        again.due(step)
    assert said == [("stepped", {"step": 4, "every": 1})], "the first new step alone"
    shared, [(own, _)] = again.read(label)
    assert_equal_arrays(own, arrays, "own/")
    assert_equal_arrays(shared, arrays, "all/")


def test_states_from_memory_that_were_never_saved_are_saved_at_the_end(slots, monkeypatch, tmp_path):
    numbers = np.arange(3.0)

    def resumed() -> Checkpoint:
        monkeypatch.setenv(VARIABLE, slots.variable[VARIABLE])
        checkpoint = Checkpoint(tmp_path, every=100, numbers=numbers)
        checkpoint.resume()
        return checkpoint

    killed = resumed()
    numbers += 7
    killed.step()
    killed._abandon()
    assert not list_checkpoints(tmp_path)
    numbers[:] = 0
    again = resumed()
    again.close()
    assert (again.steps, len(list_checkpoints(tmp_path))) == (1, 1)
    numbers[:] = 0
    load(tmp_path, numbers=numbers)
    assert numbers.tolist() == [7, 8, 9]


class Clock:
    """In place of the module `time`: each look at the seconds takes one, each at those of the thread `cost`."""

    cost, _seconds, _cpu = 10.0, 0.0, 0.0

    def perf_counter(self) -> float:
        self._seconds += 1
        return self._seconds

    def thread_time(self) -> float:
        self._cpu += self.cost
        return self._cpu


def test_records_end_where_they_cost_too_much_and_return_where_they_do_not(slots, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("distopt.checkpoint.memory.time", clock)
    memory, adapters = memory_of(slots, monkeypatch), {"own": InPlace({"x": np.ones(3)})}
    memory.start(adapters, 0, 0)
    copies = 0

    def records_after(more: int) -> bool:
        """Train until there are so many copies; whether the step after that leaves a record."""
        nonlocal copies
        before = step = memory._step
        while copies < more:
            step += 1
            memory.finish(step, 0)
            if memory.due(step):
                memory.keep(step, 0, adapters)
                copies += 1
        memory.finish(step + 1, 0)
        assert step > before
        return 2 * (step + 1) + 2 in [slot.words[VALID] for slot in slots.places[0].records]

    assert records_after(2)
    assert not records_after(10)  # the cost is first looked at when there are eight
    clock.cost = 0.0
    assert not records_after(12)
    assert records_after(20)
    clock.cost = 10.0
    assert not records_after(70)  # at 64, when those without cost are no longer among the last ones
    memory.close()


@pytest.mark.parametrize(
    ("order", "is_noted"),
    [
        (["end", "set", "loop"], True),  # as in the guide
        (["set", "loop"], True),
        (["set", "end", "loop"], False),  # a job that resumes in the loop would lack the end of the epoch
        (["end", "loop"], False),  # nobody has set the epoch
        (["end", "look", "set", "loop"], True),
        (["set", "look", "end", "loop"], False),
        (["end", "set"], False),  # the script may do more before it takes a batch
    ],
)
def test_the_last_step_of_an_epoch_counts_once_the_script_has_ended_the_epoch(slots, monkeypatch, order, is_noted):
    """`end`: own states change, as by a schedule; `look`: at a batch, with another sampler."""
    monkeypatch.setenv(VARIABLE, slots.variable[VARIABLE])
    sampler, other = ShardedSampler(12, 1, 0, 4, seed=3), ShardedSampler(12, 1, 0, 4, seed=4)
    schedule = np.zeros(2)
    acts = {
        "end": lambda: schedule.__iadd__(1),
        "set": lambda: sampler.set_epoch(1),
        "look": lambda: next(iter(other)),
        "loop": lambda: next(iter(sampler)),
    }
    noted, finish = [], Memory.finish
    monkeypatch.setattr(Memory, "finish", lambda self, *when: (noted.append(when), finish(self, *when)))
    checkpoint = Checkpoint(None, schedule=schedule, sampler=sampler, other=other)
    checkpoint.resume()
    for _ in sampler:
        checkpoint.step(0)
    assert noted == [(1, 0), (2, 0)]
    for act in order:
        acts[act]()
    assert noted == [(1, 0), (2, 0), *([(3, 1)] if is_noted else [])]
    if "loop" in order:
        checkpoint.step(1)
        assert noted[-1] == (4, 1)
    checkpoint.close()


@pytest.mark.slow
def test_a_kill_while_states_are_kept_leaves_those_before(slots, monkeypatch):
    """A rank that is killed and started again each time; some kills come in the middle of a copy."""
    numbers = random.Random(200)
    step, torn = 0, 0
    for _ in range(200):
        ready, begun = os.pipe()
        if (pid := os.fork()) == 0:
            memory, at = memory_of(slots, monkeypatch), step
            label = memory.agree()
            at = label.step if label else 0
            os.write(begun, b"!")
            while True:
                at += 1
                memory.keep(at, 0, {"x": InPlace({"w": np.full(200_000, at), "n": np.array([at])})})
        os.read(ready, 1)
        time.sleep(numbers.uniform(0.0, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(begun)
        torn += sum(not slot.is_valid and os.fstat(slot.own).st_size > 0 for slot in slots.places[0].copies)
        memory = memory_of(slots, monkeypatch)
        label = memory.agree()
        if label is not None:
            assert label.step >= step
            step = label.step
            _, [(arrays, _)] = memory.read(label)
            assert np.all(arrays["x/w"] == step)
            assert arrays["x/n"] == [step]
    assert min(step, torn) > 0


def kept(rank: int, *steps: int, attempt: int = 0, parts: Sequence[int] = (), n_shares: int = 1) -> list[Any]:
    """Report of a rank, on a node of its own, which has own states of other ranks, too."""
    labels = [[attempt, step, 0, 3] for step in steps]
    shares = [[label, [rank, n_shares], {"every": 1}, "share"] for label in labels]
    return [str(rank), [*shares, *([label, [of, 1], {}, "own"] for label in labels for of in (rank, *parts))]]


@pytest.mark.parametrize(
    ("others", "newest"),
    [
        ([kept(1, 6, 4), kept(2, 6, 4)], 6),
        # Rank 2 was killed before it had kept step 6; all give that up.
        ([kept(1, 6, 4), kept(2, 4, 2)], 4),
        # Node 2 is new. Of what its rank had of its own, rank 1 has a copy, or none.
        ([kept(1, 4, parts=[2]), kept(2)], 4),
        ([kept(1, 4), kept(2)], None),
        # Node 1 has been absent from the attempt after: newer steps of an older attempt do not count.
        ([kept(1, 8, 9, attempt=-1, parts=[0, 2]), kept(2, 4, parts=[1])], 4),
        # A share of the shared arrays of node 1 is lost, and node 0 has kept nothing after this step.
        ([kept(1, 9, n_shares=2, parts=[0, 2]), kept(2)], None),
    ],
)
def test_ranks_agree_on_the_newest_states_that_there_are(slots, monkeypatch, others, newest):
    first = memory_of(slots, monkeypatch, 3)
    for step in (4, 6):
        first.due(step)
        first.keep(step, 0, {"x": InPlace({"w": np.array([step])})})
    payloads = {rank: json.dumps(other).encode() for rank, other in enumerate(others, 1)}
    label = memory_of(slots, monkeypatch, 3, payloads).agree()
    assert (label and label.step, slots.steps) == (newest, [newest or 0])


class Own(InPlace):
    def __init__(self, rank: int, arrays: dict[str, np.ndarray]) -> None:
        super().__init__(arrays)
        self._rank = rank

    def snapshot(self) -> State:
        return State(super().snapshot().arrays, {"rank": self._rank})


def states_of(rank: int, step: int) -> dict[str, InPlace]:
    shared = {"w": np.arange(50.0) * step, "v": np.full((2, 3), step, np.float32)}
    return {"all": Shared(shared), "own": Own(rank, {"x": np.full(3, 100 * rank + step)})}


@pytest.fixture
def nodes() -> Iterator[dict[str, StateSlots]]:
    slots = {node: StateSlots(NODES.count(node), 3) for node in ("0", "1")}
    yield slots
    for each in slots.values():
        each.close()


def on_ranks(nodes: dict[str, StateSlots], body: Callable[[int, Memory], object], of=NODES, attempt=0) -> None:
    """Call `body` on each rank of an attempt, in a thread; `of` names the nodes of the ranks."""

    def run(ranks: OracleCommunicator) -> None:
        rank = ranks.topology.rank
        node = of[rank]
        body(rank, Memory(of[:rank].count(node), of.count(node), nodes[node].fds, ranks, node, attempt))

    thread_ranks.on_ranks(len(of), run)


def train(rank: int, memory: Memory, steps: int) -> None:
    assert memory.agree() is None
    for step in range(1, 1 + steps):
        memory.keep(step, 0, states_of(rank, step))


def carry(nodes: dict[str, StateSlots]) -> None:
    """What the agents do: the own states of each node go to the other one."""
    for node, other in (("0", "1"), ("1", "0")):
        files = [slot for place in nodes[node].places for slot in (*place.copies, *place.records)]
        sending = [slot for slot in files if slot.is_valid and slot.words[POST] == TO_SEND]
        sent = [os.pread(slot.own, os.fstat(slot.own).st_size, 0) for slot in sending]
        nodes[other].start(sent)


@pytest.mark.parametrize("last", [3, 10])  # copies that need no other rank
def test_ranks_that_are_a_copy_apart_resume_from_the_copy_before(nodes, last):
    def resume(rank: int, memory: Memory) -> None:
        assert memory.agree() == Label(0, last - 1, 0, 3)

    on_ranks(nodes, lambda rank, memory: train(rank, memory, last - (rank == 2)))
    on_ranks(nodes, resume)


@pytest.mark.parametrize(
    "after",
    [
        ["0", "0"],  # node 1 is lost
        ["0"],  # and a rank of node 0, whose slots stay
        ["1"],  # node 0 is lost
        ["0", "1"],  # a rank of node 0
        ["0", "0", "2"],  # node 2 takes the place of node 1
        ["2", "2", "1"],  # of node 0
        ["0", "0", "1", "2", "2"],  # it comes
        ["1", "0", "0"],  # the nodes have other numbers
    ],
)
@pytest.mark.parametrize("piece_bytes", [100, 1 << 20])  # several pieces, and one
def test_other_ranks_get_all_states(nodes, after, piece_bytes, monkeypatch):
    monkeypatch.setattr("distopt.checkpoint.memory._PIECE_BYTES", piece_bytes)
    newest = 5

    def resume(rank: int, memory: Memory) -> None:
        label = memory.agree()
        assert label == Label(0, newest, 0, 3)
        shared, owns = memory.read(label)
        numbers = [rank] if len(after) == 3 else range(3)
        for number, (own, notes) in zip(numbers, owns, strict=True):
            assert_equal_arrays(own, states_of(number, newest)["own"].snapshot().arrays, "own/")
            assert notes == {"own": {"rank": number}}
        assert_equal_arrays(shared, states_of(0, newest)["all"].snapshot().arrays, "all/")
        memory.keep(newest + 1, 0, states_of(rank, newest + 1))

    def resume_again(rank: int, memory: Memory) -> None:
        """From the states of the attempt before, though slots of older ones have not been written again."""
        label = memory.agree()
        assert label == Label(1, newest + 1, 0, len(after))
        _, [(own, _)] = memory.read(label)
        assert_equal_arrays(own, states_of(rank, newest + 1)["own"].snapshot().arrays, "own/")

    on_ranks(nodes, lambda rank, memory: train(rank, memory, newest))
    carry(nodes)
    lost = {"0", "1"} - set(after)
    for node in [*lost, "2"]:
        if node in nodes:
            nodes[node].close()
        nodes[node] = StateSlots(2, 3)
    on_ranks(nodes, resume, after, 1)
    on_ranks(nodes, resume_again, after, 2)
