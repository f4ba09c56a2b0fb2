"""Checkpoints: what they hold, what is refused, what is kept, and faults of the disk. Ranks are threads here."""

import contextlib
import json
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections import defaultdict, namedtuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import distopt
from distopt import launch, layer, opt, tensor
from distopt.checkpoint import Checkpoint, checkpoint, load
from distopt.checkpoint.folder import rank_file, share_of, survey
from distopt.data import ShardedSampler
from distopt.errors import CheckpointError, StateError, UsageError
from tests.conformance.thread_ranks import on_ranks
from tests.unit.nets import Chain
from tests.unit.refusals import refused

RANKS = 2
FILES = ["checkpoint.json", *(rank_file(rank) for rank in range(RANKS))]


class Weights:
    """An object with states: one array that all ranks share, one of each rank, and a note."""

    def __init__(self, rank: int) -> None:
        self.shared, self.own = np.arange(5, dtype=np.float32), np.full(3, rank, np.float64)
        self.note = {"of": [1, None]}

    def get_states(self):
        return {"shared": self.shared, "own": self.own, "note": self.note}

    def set_states(self, states):
        self.shared[:], self.own[:], self.note = states["shared"], states["own"], states["note"]

    def shared_states(self, names):
        return {"shared"} & set(names)


class Rank:
    """A job of one thread: its values tell at which step they are."""

    def __init__(self, comm, folder, **options) -> None:
        self.rank, self.comm = comm.topology.rank, comm
        self.weights, self.array = Weights(self.rank), np.zeros((2, 3), np.int32)
        self.noise = np.random.default_rng(self.rank)
        parts = {"weights": self.weights, "array": self.array, "noise": self.noise}
        self.checkpoint = Checkpoint(folder, communicator=comm, every=1, **parts, **options)

    def resumed(self) -> "Rank":
        self.checkpoint.resume()
        return self

    def step(self, count=1) -> None:
        for _ in range(count):
            self.comm.barrier()  # as gradients do: no rank saves before all have begun to write the save before
            self.weights.shared += 1
            self.weights.own += 10
            self.weights.note = {"of": [self.checkpoint.steps + 1, None]}
            self.array += 1
            self.noise.random()
            self.checkpoint.step()

    def assert_at(self, step) -> None:
        assert self.checkpoint.steps == step
        np.testing.assert_array_equal(self.weights.shared, np.arange(5) + step)
        np.testing.assert_array_equal(self.weights.own, np.full(3, self.rank + 10 * step))
        assert self.weights.note == {"of": [step or 1, None]}
        assert (self.array == step).all()
        expected = np.random.default_rng(self.rank)
        expected.random(step)
        assert self.noise.random() == expected.random()


def run(folder, steps, world_size=RANKS, **options) -> None:
    """A job that resumes from `folder`, or starts anew, and ends well."""

    def body(comm):
        own = Rank(comm, folder, **options).resumed()
        own.step(steps)
        own.checkpoint.close()

    on_ranks(world_size, body)


def resumed(folder, world_size=RANKS, **options) -> list:
    """What `resume` returns on each rank of a job that only resumes."""

    def body(comm):
        own = Rank(comm, folder)
        found = own.checkpoint.resume(**options)
        own.assert_at(0 if found is None else found.step)
        own.checkpoint.close()
        return found

    return on_ranks(world_size, body)


def assert_goes_on(folder, step, world_size=RANKS) -> None:
    """A job resumes from that step; 0: it starts anew."""
    steps = [0 if found is None else found.step for found in resumed(folder, world_size)]
    assert steps == [step] * world_size


def opened(folder, **options) -> Checkpoint:
    """One that has resumed."""
    saver = Checkpoint(folder, **options)
    saver.resume()
    return saver


def save(folder, epoch=None, **objects) -> None:
    """One checkpoint by a job of one rank."""
    with opened(folder, **objects) as saver:
        saver.save(epoch)


def names(folder) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))


def step_name(step: int) -> str:
    return f"step-{step:010d}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    run(folder, 3)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


# -- what is saved ----------------------------------------------------------------------------------------------------
def test_files_of_a_checkpoint(saved):
    assert names(saved) == [step_name(step) for step in (1, 2, 3)]
    assert names(saved / step_name(3)) == sorted(FILES)
    manifest = json.loads((saved / step_name(3) / "checkpoint.json").read_text())
    assert (manifest["step"], manifest["epoch"], manifest["world_size"]) == (3, 0, 2)
    assert manifest["objects"] == ["array", "noise", "weights"]
    assert {"distopt", "numpy", "python", "instruction set", "ranks of each host"} <= set(manifest["versions"])
    from safetensors.numpy import load_file

    first, second = (load_file(saved / step_name(3) / rank_file(rank)) for rank in range(2))
    assert first.keys() == {"shared/weights/shared", "own/weights/own", "own/array/"}
    assert second.keys() == {"own/weights/own", "own/array/"}
    np.testing.assert_array_equal(second["own/weights/own"], [31, 31, 31])


def test_parameters_of_pytorch_are_shared_where_their_optimizer_says_so():
    torch = pytest.importorskip("torch")
    from distopt.torch.checkpoint.states import parts_of

    model = torch.nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for optimizer.parameters_agree, shared in ((False, set()), (True, {"weight", "bias"})):
        part = parts_of({"model": model, "optimizer": optimizer}, replicated=True)["model"]
        assert part.shared(part.snapshot().arrays) == shared


def test_ranks_write_about_as_much_as_each_other():
    arrays = {f"a{i}": np.full(size, i, np.uint8) for i, size in enumerate([70, 10, 60, 11, 9, 0, 40, 40])}
    shares = [share_of(rank, 3, arrays) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(arrays)
    assert all(array is arrays[name] for share in shares for name, array in share.items())
    assert all(70 <= sum(array.size for array in share.values()) <= 90 for share in shares)


def test_the_communicator_is_that_of_the_world(tmp_path):
    with distopt.init(launch.Ticket(), 0, 1) as world:
        assert Checkpoint(tmp_path, values=np.zeros(1))._communicator is world.communicator


def net(width=4) -> Chain:
    made = Chain(linear=layer.Linear(width))
    made.set_optimizer(opt.SGD(lr=0.1, momentum=0.9))
    made.compile([tensor.Tensor((2, 3))], is_train=True)
    return made


def test_a_model_alone_is_loaded_from_a_checkpoint_of_more(tmp_path):
    trained, other = net(), net()
    trained.linear.W.array[:] = 7
    save(tmp_path, 2, model=trained, optimizer=trained.optimizer, extra=np.zeros(1))
    assert load(tmp_path, model=other).epoch == 2
    np.testing.assert_array_equal(other.linear.W.array, trained.linear.W.array)
    assert load(tmp_path / "absent", model=other) is None


def test_the_copy_is_made_before_training_goes_on(tmp_path, monkeypatch):
    """A save returns while the files are still to be written, the next one waits, and values are of their step."""
    may_write, write_rank = threading.Event(), checkpoint.write_rank
    begun = []

    def slow(folder, *args):
        begun.append(folder.name)
        assert may_write.wait(200)
        write_rank(folder, *args)

    monkeypatch.setattr(checkpoint, "write_rank", slow)

    def body(comm):
        own = Rank(comm, tmp_path).resumed()
        own.step()
        own.weights.shared += 100  # more training
        own.array += 100
        own.noise.random(50)
        second = threading.Thread(target=own.checkpoint.step)
        second.start()
        second.join(0.2)
        assert second.is_alive()
        assert begun == [step_name(1)]
        may_write.set()
        second.join()
        own.checkpoint.close()
        assert begun == [step_name(1), step_name(2)]

    on_ranks(1, body)
    shutil.rmtree(tmp_path / step_name(2))
    assert_goes_on(tmp_path, 1, world_size=1)


def test_the_script_of_the_docs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs/guide/checkpoints.md").read_text()
    code, preemptible = re.findall(r"```python\n(.*?)```", text, re.S)
    for said in ("", "Resuming from runs/a/step-0000000100 (step 100, epoch 10)\n"):
        made = net()
        names = {"net": made, "sgd": made.optimizer, "sampler": ShardedSampler(20, 1, 0, 2)}
        names |= {"rng": np.random.default_rng(1), "np": np}
        exec(code, names)
        exec(preemptible, names)
        assert capsys.readouterr().out == said


def test_a_step_is_saved_once_in_an_epoch(tmp_path):
    values = np.zeros(2)
    with opened(tmp_path, every=1, values=values) as saver:
        saver.step(epoch=4)
        values += 1
        saver.save(epoch=4)
    assert load(tmp_path, values=values).epoch == 4
    assert not values.any()
    for epoch in (5, 6):  # in which the job has not made a step yet
        with opened(tmp_path, values=values) as saver:
            values += 1
            saver.save()
            saver.save(epoch)
            values += 1
            saver.save()
    assert load(tmp_path, values=values).epoch == 6
    assert (values == 2).all()
    assert names(tmp_path) == [step_name(1), f"{step_name(1)}-0001", f"{step_name(1)}-0002"]
    with opened(tmp_path, every=1, keep=1, values=values) as saver:
        saver.step()
    assert names(tmp_path) == [step_name(2)]


@pytest.mark.parametrize("sets", [False, True], ids=["no set_epoch", "set_epoch"])
@pytest.mark.parametrize(("after", "steps"), [(None, [5, 5, 5, 5]), (4, [5, 5, 1, 5]), (5, [5, 5, 0, 5])])
def test_an_epoch_is_whole_whether_or_not_the_script_sets_it(tmp_path, sets, after, steps):
    """The first job ends after two epochs, or after some steps of the third one."""

    def epochs(last, stop=None):
        sampler = ShardedSampler(10, 1, 0, 2)
        with opened(tmp_path, sampler=sampler) as saver:
            for epoch in range(saver.epoch, last):
                if sets:
                    sampler.set_epoch(epoch)
                taken = 0
                for _ in sampler:
                    taken += 1
                    saver.step(epoch)
                    if (epoch, taken) == (2, stop):
                        saver.save()
                        return
                saver.save(epoch + 1)
                yield taken

    assert [*epochs(2 if after is None else 3, after), *epochs(4)] == steps


def test_reset_is_of_the_first_start_alone(tmp_path, monkeypatch):
    """The same command line starts ranks again after a failure."""
    values = np.full(2, 3.0)
    save(tmp_path, values=values)
    for count, kept in (("1", True), ("0", False)):
        values[:] = 0
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        with Checkpoint(tmp_path, values=values) as saver:
            assert (saver.resume(reset=True) is not None) == kept
        assert (values == (3 if kept else 0)).all()
    assert names(tmp_path) == []


def test_the_folder_is_that_of_the_working_directory_at_resume_or_none(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with opened("run", every=1, values=np.zeros(2)) as saver:
        monkeypatch.chdir(tmp_path / "elsewhere")
        saver.step()
    assert names(tmp_path / "run") == [step_name(1)]
    with Checkpoint(None, every=1, values=np.zeros(2)) as saver:
        assert saver.resume(reset=True) is None
        saver.step(epoch=1)
        saver.save()
        assert (saver.steps, saver.epoch) == (1, 1)
    assert names(tmp_path / "elsewhere") == []


# -- what is refused --------------------------------------------------------------------------------------------------
def assert_refused(folder, reason: str, caplog) -> None:
    """A job of two ranks refuses checkpoint 3, says why in one line, and resumes from checkpoint 2."""
    caplog.clear()
    assert_goes_on(folder, 2)
    (said,) = caplog.messages
    assert re.search(f"checkpoint {folder / step_name(3)} is refused.*{reason}", said)


# Contents in the place of a file of the newest checkpoint, and the reason that is told.
FAULTS = {
    "missing": "{} is missing; the job ended before",
    **dict.fromkeys(["empty", "half", "without its end"], "{} is .*truncated"),
    "of another save": "save than checkpoint.json beside it",
    "foreign": "{} was not written by distopt.checkpoint",
    "of the other rank": "{} is the file of rank ",
    **dict.fromkeys(["of one rank", "of three ranks"], "{} is corrupt"),
}
# Files that a fault has together, where it is not one after the other.
TOGETHER = {
    "of the other rank": [FILES[1:2], FILES[2:], FILES[1:]],
    "of one rank": [FILES[:1]],
    "of three ranks": [FILES[:1]],
}


def faulty(kind, name, now, before) -> bytes | None:
    """What is in the place of a file, by the files of its checkpoint and of the one before; None: nothing."""
    content = now[name]
    return {
        "missing": None,
        "empty": b"",
        "half": content[: len(content) // 2],
        "without its end": content[:-2],
        "of another save": before[name],
        "foreign": b'{"format": "other"}' if name == FILES[0] else (8).to_bytes(8, "little") + b"{      }",
        "of the other rank": now[FILES[1 if name == FILES[2] else 2]],
        "of one rank": content.replace(b'"world_size": 2', b'"world_size": 1'),
        "of three ranks": content.replace(b'"world_size": 2', b'"world_size": 3'),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "files"), [(kind, files) for kind in FAULTS for files in TOGETHER.get(kind, [[name] for name in FILES])]
)
def test_a_faulty_checkpoint_is_refused(copy, caplog, kind, files):
    now, before = ({name: (copy / step_name(step) / name).read_bytes() for name in FILES} for step in (3, 2))
    for name in files:
        path = copy / step_name(3) / name
        if (content := faulty(kind, name, now, before)) is None:  # a rank has died while it wrote
            path.rename(path.with_name(f".{name}.0123456789abcdef.tmp"))
        else:
            path.write_bytes(content)
    assert_refused(copy, FAULTS[kind].format(files[0]), caplog)
    for name in files:
        (copy / step_name(3) / name).write_bytes(now[name])
    assert_goes_on(copy, 3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.sampled_from(FILES), st.integers(0, 10**6), st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(copy, caplog, file, place, bit):
    path = copy / step_name(3) / file
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[place % len(content)] ^= 1 << bit
    if file.endswith("json"):
        with contextlib.suppress(ValueError):
            assume(json.loads(bytes(damaged)) != json.loads(content))  # another kind of white space
    path.write_bytes(damaged)
    try:
        assert_refused(copy, file, caplog)
    finally:
        path.write_bytes(content)


def damage(path):
    """Change the last byte, which is of an array."""
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def test_of_damaged_checkpoints_alone_none_is_used_and_nothing_changes(copy):
    for step in (1, 2, 3):
        damage(copy / step_name(step) / FILES[2])
    shutil.rmtree(copy / step_name(1))

    def body(comm):
        own = Rank(comm, copy)
        error = r"none of the 2 checkpoints in .*copy can be used, .* rank 1 .* corrupt"
        refused(StateError, error, own.checkpoint.resume)
        own.assert_at(0)

    on_ranks(RANKS, body)
    assert len(names(copy)) == 2


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        ({"model": net()}, {"model": net(), "noise": np.random.default_rng()}, "it has no noise"),
        ({"a": opt.Adam()}, {"a": net()}, "linear.[Wb] is missing; the states are of another model"),
        ({"a": np.zeros(3)}, {"a": np.zeros(4)}, r"of shape \(4,\), that of the states float64 of shape \(3,\)"),
        ({"a": np.zeros(3)}, {"a": np.zeros(3, np.int64)}, "is int64"),
        ({"a": {"x": np.zeros(3)}}, {"a": {"y": np.zeros(3)}}, "is missing|has no x"),
        ({"n": np.random.default_rng()}, {"n": np.random.Generator(np.random.Philox())}, "is a Philox, .* a PCG64"),
        ({"s": ShardedSampler(9, 1, 0, 2)}, {"s": ShardedSampler(8, 1, 0, 2)}, "size is 8, that of the states 9"),
    ],
)
def test_checkpoints_of_other_scripts_are_refused(tmp_path, theirs, ours, reason):
    save(tmp_path / "folder", **theirs)
    refused(StateError, reason, load, tmp_path / "folder", **ours)
    (tmp_path / "file").write_text("")
    refused(StateError, "file cannot be read", load, tmp_path / "file", **ours)


# -- the first checkpoint ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lost", FILES)
def test_a_job_killed_in_its_first_save_starts_anew(tmp_path, caplog, lost):
    run(tmp_path, 1)
    (tmp_path / step_name(1) / lost).unlink()
    assert_goes_on(tmp_path, 0)
    assert len(caplog.records) == 1
    run(tmp_path, 2)
    assert_goes_on(tmp_path, 2)


@pytest.mark.parametrize(("steps", "error"), [(1, "truncated"), (2, "none of the 1 checkpoints")])
def test_a_damaged_or_a_later_one_is_no_unfinished_first(tmp_path, steps, error):
    run(tmp_path, steps, keep=1)
    path = tmp_path / step_name(steps) / FILES[2]
    content = path.read_bytes()
    path.unlink()
    if steps == 1:
        path.write_bytes(content[:-1])
    refused(StateError, error, run, tmp_path, 1)


# -- what is kept -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_last_ones_are_kept(tmp_path, keep):
    run(tmp_path, 6, keep=keep)
    assert names(tmp_path) == [step_name(step) for step in range(7 - keep, 7)]
    run(tmp_path, 1, keep=2)
    assert names(tmp_path) == [step_name(6), step_name(7)]


def rank_1_cannot_write(monkeypatch, error: Exception) -> threading.Event:
    """Until the event is cleared."""
    write_rank, broken = checkpoint.write_rank, threading.Event()
    broken.set()

    def write(folder, rank, *args):
        if rank == 1 and broken.is_set():
            raise error
        write_rank(folder, rank, *args)

    monkeypatch.setattr(checkpoint, "write_rank", write)
    return broken


def test_an_older_one_goes_only_when_a_newer_is_whole(tmp_path, monkeypatch):
    """Rank 1 cannot write: the checkpoint before stays, however many fail."""
    run(tmp_path, 2, keep=1)
    broken = rank_1_cannot_write(monkeypatch, OSError(28, "No space left on device"))

    def body(comm):
        own = Rank(comm, tmp_path, keep=1).resumed()
        own.step(5)
        own.checkpoint._wait()
        comm.barrier()
        found = names(tmp_path)
        comm.barrier()
        broken.clear()
        own.step()
        own.checkpoint.close()
        return found

    for found in on_ranks(RANKS, body):
        assert found in ([step_name(step) for step in steps] for steps in ((2, 6, 7), (2, 5, 6, 7)))
    assert names(tmp_path) == [step_name(8)]
    assert_goes_on(tmp_path, 8)


def test_what_is_not_of_a_checkpoint_is_left_alone(copy):
    for folder in ("step-1", step_name(9)):
        (copy / folder).mkdir()
    for file in ("notes.txt", f"{step_name(9)}/mine", step_name(8), f"{step_name(2)}/mine"):
        (copy / file).write_text("mine")
    (copy / step_name(2) / ".rank-00001.safetensors.0123456789abcdef.tmp").write_text("an orphan")
    run(copy, 3, keep=1)
    assert names(copy) == sorted(["notes.txt", "step-1", *map(step_name, (2, 6, 8, 9))])
    assert names(copy / step_name(2)) == ["mine"]
    assert not list(copy.rglob("*.tmp"))
    assert resumed(copy, reset=True) == [None] * RANKS
    assert step_name(6) not in names(copy)
    assert (copy / step_name(9) / "mine").read_text() == "mine"
    assert_goes_on(copy, 0)


def test_a_refused_checkpoint_is_none_of_those_that_are_kept(copy, caplog):
    """Its files look whole, and only who reads all of it sees the damage; of three ranks, one tells."""
    damage(copy / step_name(3) / FILES[2])
    assert survey(copy / step_name(3)).whole
    on_ranks(3, lambda comm: Rank(comm, copy).checkpoint.resume())
    assert sum("is refused" in record.getMessage() for record in caplog.records) == 1

    def body(comm):
        own = Rank(comm, copy, keep=2)
        assert own.checkpoint.resume().refused == (step_name(3),)
        own.checkpoint.steps = 3
        own.step()
        own.checkpoint.close()

    on_ranks(RANKS, body)
    assert names(copy) == [step_name(2), step_name(4)]


def test_files_of_a_killed_run_do_not_complete_a_later_one(tmp_path):
    """Killed between two ranks, twice, at the same step: the files of both runs are not a checkpoint."""
    run(tmp_path, 2)
    first = (tmp_path / step_name(2) / FILES[2]).read_bytes()
    (tmp_path / step_name(2) / FILES[2]).unlink()
    run(tmp_path, 1)
    (tmp_path / step_name(2) / FILES[2]).write_bytes(first)
    assert_goes_on(tmp_path, 1)


# -- faults -----------------------------------------------------------------------------------------------------------
def test_training_goes_on_when_checkpoints_cannot_be_written(tmp_path, caplog):
    folder = tmp_path / "folder"
    folder.mkdir()
    own = np.zeros(500)

    saver = opened(folder, every=1, own=own)
    saver.step()
    saver._wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))  # as of a full disk
    try:
        for _ in range(3):
            own += 1
            saver.step()
        saver._wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    cure = r"File too large; raise the limit of file sizes \(ulimit -f\), or choose another folder"
    line = rf"step 4 could not be saved: .*{re.escape(step_name(4))}.*: {cure}"
    assert re.fullmatch(rf"rank 0 \(\S+\): {line}; training continues, older checkpoints stay", said[-1]), said[-1]
    assert own[0] == 3
    refused(CheckpointError, line, saver.close)
    assert load(folder, own=own).step == 1
    assert own[0] == 0
    saver = opened(folder, every=1, own=own)  # and when the fault is gone, all is well
    saver.step()
    saver.close()
    assert load(folder, own=own).step == 2
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError("no room"), r"MemoryError\('no room'\)"),
        (PermissionError(13, "Permission denied"), "denied; allow this user to write there, or choose another"),
    ],
)
def test_one_rank_that_cannot_write_fails_all_at_the_end(tmp_path, monkeypatch, error, told):
    rank_1_cannot_write(monkeypatch, error)

    def body(comm):
        own = Rank(comm, tmp_path).resumed()
        own.step()
        refused(CheckpointError, rf"rank 1 \(\S+\): step 1 could not be saved: .*{told}", own.checkpoint.close)

    on_ranks(RANKS, body)


def assert_refused_on_all_ranks(make, match) -> None:
    """`resume` of `make(communicator)`, before training."""
    on_ranks(RANKS, lambda comm: refused(CheckpointError, match, make(comm).resume))


@pytest.mark.parametrize(("link", "reason"), [("", "File exists|Not a directory"), ("/proc/1/nowhere", "folder")])
def test_a_folder_that_cannot_be_made_is_an_error_before_training(tmp_path, link, reason):
    folder = tmp_path / "folder"
    folder.symlink_to(link) if link else folder.write_text("a file")
    error = rf"rank 0 \(\S+\): .*({reason}).*choose another folder"
    assert_refused_on_all_ranks(lambda comm: Rank(comm, folder).checkpoint, error)


def test_ranks_with_other_folders_or_objects_are_told_before_training(tmp_path):
    def of_rank(comm):
        return Rank(comm, tmp_path / str(comm.topology.rank)).checkpoint

    assert_refused_on_all_ranks(of_rank, r"rank 1 \(\S+\): .*1.*, on a file system that all hosts share")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / ".lock").write_text("of an earlier run")
    assert_refused_on_all_ranks(of_rank, r"rank 1 .*1 is not the folder that rank 0 sees; choose one on a file")

    def with_own(comm):
        own = {"own": np.zeros(1)} if comm.topology.rank else {}
        return Checkpoint(tmp_path, communicator=comm, all=np.zeros(1), **own)

    assert_refused_on_all_ranks(with_own, r"rank 1 \(\S+\): it saves own, which rank 0 does not; pass")


class Told:
    """An object whose states are those that it is given."""

    def __init__(self, **states) -> None:
        self.states = states

    def get_states(self):
        return self.states

    def set_states(self, states):
        self.states = states


def test_states_come_back_with_their_types(tmp_path):
    states = {"scalar": np.float32(0.1), "group": {"n": np.int64(3), "a": np.ones(2)}, "array": np.array(2.5), "n": 3}
    save(tmp_path, told=Told(**states))
    found = Told(**states)
    load(tmp_path, told=found)
    assert found.states.keys() == states.keys()
    assert (type(found.states["scalar"]), found.states["scalar"]) == (np.float32, np.float32(0.1))
    assert (type(found.states["group"]["n"]), found.states["group"]["n"]) == (np.int64, 3)
    assert type(found.states["group"]["a"]) is type(found.states["array"]) is np.ndarray


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (Told(value=(1, 2)), r"Told.get_states\(\)\['value'\] is a tuple, which .* cannot give back; make it a number"),
        (Told(value=Pair(1, 2)), "is a Pair"),
        (Told(value=[{"x": defaultdict(int)}]), r"\['value'\]\[0\]\['x'\] is a defaultdict"),
        (Told(value={1: "a"}), "has the key 1, which would come back as text"),
        (Told(value={"a", "b"}), "is a set"),
        (Told(value=np.ma.masked_array([1.0], [True])), "a masked array would lose its mask; pass array.filled"),
        (Told(x=np.zeros(2, complex)), "^own/x has dtype complex128, which safetensors files do not know"),
        (np.zeros(2, complex), "^own has dtype complex128, which safetensors files do not know"),
        (Chain(linear=layer.Linear(4)), "a Chain has no states yet; call compile"),
    ],
    ids=range(9),
)
def test_what_would_not_come_back_as_it_was_is_an_error_at_the_save(tmp_path, thing, words):
    saver = Checkpoint(tmp_path, own=thing)
    refused(UsageError, words, lambda: saver.resume() or saver.save())
    saver.close()
    assert names(tmp_path) == []


def test_an_error_in_the_body_waits_for_this_rank_only(tmp_path):
    def body(comm):
        own = Rank(comm, tmp_path).resumed()
        own.step()
        if comm.topology.rank == 0:
            with pytest.raises(ZeroDivisionError), own.checkpoint:
                raise ZeroDivisionError
        own.checkpoint._wait()

    on_ranks(RANKS, body)
    assert_goes_on(tmp_path, 1)


# -- misuse -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": -1, "a": np.zeros(1)}, "every is -1"),
        ({"keep": 0, "a": np.zeros(1)}, "keep is 0"),
        ({"a": 3}, "a is a int, which cannot be saved; pass an object with get_states"),
        ({"a": {}}, "a is a dict"),
        ({"a": {"x": "text"}}, "a is a dict"),
        ({"a": np.frombuffer(bytes(8))}, "a is read-only"),
        ({"a": {"x": np.zeros(1), "y": np.broadcast_to(np.zeros(1), 3)}}, "a is read-only"),
        ({"a/b": np.zeros(1), "a": {"b": np.zeros(1)}}, "the name 'a/b' has a '/'"),
    ],
)
def test_bad_arguments(tmp_path, options, message):
    refused(UsageError, message, Checkpoint, tmp_path, **options)


def test_a_save_without_resume_or_beside_another_is_refused(tmp_path):
    saver = Checkpoint(tmp_path, values=np.zeros(1))
    refused(UsageError, "resume has not been called", saver.save)
    saver.resume()
    saver.close()
    refused(UsageError, "resume has not been called", saver.save)
    with opened(tmp_path, own=np.zeros(1)):
        second = Checkpoint(tmp_path, own=np.zeros(1))
        refused(CheckpointError, "another Checkpoint of this process writes to .*; close that first", second.resume)


# -- other numbers of ranks --------------------------------------------------------------------------------------------
def test_what_has_no_mean_is_refused(tmp_path):
    def body(comm):
        saver = Checkpoint(tmp_path, communicator=comm, counts=np.array([comm.topology.rank]))
        if comm.topology.world_size == 3:
            error = "counts: an array of int64 differs from rank to rank; use as many ranks again"
            refused(StateError, error, saver.resume)
            return
        saver.resume()
        saver.save()
        saver.close()

    on_ranks(2, body)
    on_ranks(3, body)


# -- ends of epochs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "saved"), [(5, [6, 10]), (1, [1, 2, 3, 4, 6, 7, 8, 9, 10]), (3, [3, 6, 9])])
def test_a_save_that_is_due_at_the_end_of_an_epoch_comes_with_the_next_call(tmp_path, every, saved):
    sampler = ShardedSampler(10, 1, 0, 2)
    with opened(tmp_path, every=every, keep=99, sampler=sampler) as saver:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for _ in sampler:
                saver.step(epoch)
    assert names(tmp_path) == [step_name(step) for step in saved]
    if 10 in saved:
        assert load(tmp_path, sampler=sampler).epoch == 2


def test_a_sampler_at_its_end_stops_no_saves_and_is_spoken_of(tmp_path, caplog):
    sampler = ShardedSampler(10, 1, 0, 2)
    with opened(tmp_path, every=1, keep=99, sampler=sampler) as saver:
        list(sampler)
        for _ in range(6):
            saver.step()
    assert names(tmp_path) == [step_name(step) for step in (2, 4, 6)]
    for _ in range(2):
        sampler = ShardedSampler(10, 1, 0, 2)
        with opened(tmp_path / "again", sampler=sampler) as saver:
            list(sampler)
            saver.save()
    said = [text for text in caplog.messages if "again" in text]
    assert ["saved after the last batch of its epoch" in text for text in said] == [True]
    assert said[0].count("call save(epoch + 1)") == 1


# -- another job reads -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", [1, 3])
def test_a_job_reads_beside_one_that_saves_and_removes_but_does_not_write(tmp_path, keep, caplog):
    """Beside another process, since Python's threads would take turns."""
    code = (
        "import sys, numpy as np; from distopt.checkpoint import Checkpoint\n"
        "a = np.zeros(1000); saver = Checkpoint(sys.argv[1], every=1, keep=int(sys.argv[2]), a=a); saver.resume()\n"
        "while True: a += 1; saver.step()"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(keep)])
    try:
        a, found = np.zeros(1000), []
        while not load(tmp_path, a=a):
            assert writer.poll() is None
        for _ in range(100):
            found.append(load(tmp_path, a=a).step)
            assert (a == found[-1]).all()
        who = f"its rank 0 is process {writer.pid} on host {socket.gethostname()}"
        error = f"another job writes checkpoints to {tmp_path}: {who}; wait"
        refused(CheckpointError, re.escape(error), Checkpoint(tmp_path, a=a).resume)
    finally:
        writer.kill()
        writer.wait()
    assert found == sorted(found)
    assert found[0] < found[-1]
    assert not caplog.text
    opened(tmp_path, a=a).close()


def test_advice_to_remove_checkpoints_is_for_the_job_that_writes_them(tmp_path):
    save(tmp_path, a=np.zeros(3))
    assert "reset" not in str(refused(StateError, "b", load, tmp_path, b=np.zeros(3)))
    refused(StateError, "reset=True", Checkpoint(tmp_path, b=np.zeros(3)).resume)
    manifest = next(tmp_path.glob("step-*/checkpoint.json"))
    manifest.write_text(manifest.read_text().replace('"version": "1"', '"version": "7"'))
    error = "has version 7 of its format, and this distopt reads version 1"
    refused(StateError, error, load, tmp_path, a=np.zeros(3))
