"""Saving while training continues."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from ..checks import check_integer
from ..errors import CheckpointError, UsageError
from ..files import described, file_lock, type_of
from ..launch.launchers.distopt_run import DISTOPT_RUN
from ..recorder.timeline import timeline
from ..settings import Settings
from .adapters import adapters_of, copy_of, exchanged, snapshot_of
from .folder import Manifest, list_checkpoints, name_of, prune, remove, share_of, write_rank
from .hashes import LOG, HashLog, cut_log, settings_of
from .load import first_reason, load_newest, ranks_of
from .memory import Memory
from .preemption import Preemption

if TYPE_CHECKING:
    from ..files import Arrays
    from .adapters import Adapter, Ranks
    from .load import Resumed

_log = logging.getLogger("distopt")


class Checkpoint:
    """Saves a training job every few steps, and resumes it from there.

    Objects are saved and restored by the names of their arguments. They can be

    - objects with `get_states` and `set_states`, such as a model, an optimizer, `DistOpt` and `ShardedSampler`: the
      states are tensors, arrays, dictionaries of these, and values of JSON, by name. `check_states(states)` may raise a
      StateError before anything is changed. `shared_states(names)` may say which arrays are the same on all ranks.
      Arrays are copied, unless `states_are_copies` is set.
    - tensors and arrays of NumPy or CuPy, and dictionaries of them: their values are overwritten in place;
    - random generators of NumPy and Python.

    The random generators of the devices of models and tensors are saved too. Each rank writes its own states, and its
    share of the states that are the same on all ranks.

    A save copies these to host memory, then a thread writes the copy while training continues. There is one copy at
    a time: a save waits until the previous one has been written. All ranks call the methods at the same steps.

    Args:
        folder: where checkpoints are, one folder for each; on a file system that all ranks see. With None, nothing is
            saved and all methods do nothing, so a script needs no `if`.
        every: `step` saves after every `every` steps; 0 leaves it to calls of `save`.
        keep: how many complete checkpoints to keep.
        preemptible: between `resume` and `close`, SIGTERM, SIGUSR1 and SIGUSR2 make `step` save, and end the job by
            raising `Preempted`. In a Slurm job, it asks Slurm to queue the job again. See 'Checkpoints and
            healing' in the documentation.
        communicator: of the ranks (default: that of the first object that has one, else that of `distopt.init`, else a
            job of one rank).
        objects: see above.

    Attributes:
        steps: number of finished training steps.
        epoch: the last one passed to `step` or `save`.

    Raises:
        UsageError: a number is out of range, or an object cannot be saved.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        *,
        every: int = 0,
        keep: int = 3,
        preemptible: bool = False,
        communicator: Ranks | None = None,
        **objects: Any,
    ) -> None:
        """Local."""
        self.steps = self.epoch = 0
        self._root = None if folder is None else Path(folder)
        self._every, self._keep = check_integer("every", every, 0), check_integer("keep", keep, 1)
        self._preemptible = preemptible
        self._preemption: Preemption | None = None  # while signals are put off
        self._communicator = ranks_of(objects) if communicator is None else communicator
        self._rank = self._communicator.topology.rank
        self._objects = objects
        adapters_of(objects)
        self._run = ""  # names this run, on all ranks
        self._names: list[str] = []  # of the last two checkpoints: saved, tried, or the one that the job resumed from
        self._saved: tuple[int, int] | None = None  # step and epoch of the last of them
        self._is_due = False  # whether a save waits for the end of an epoch
        self._signum = 0  # a signal, on which the job leaves at the end of an epoch
        self._waits = False  # whether the last step was the last of its epoch
        self._is_noted = True  # whether the memory knows of that step
        self._begins: Any = None  # the sampler whose next epoch is set, until its first batch
        self._first = True  # whether no complete checkpoint precedes the next
        self._only_in_memory = False  # whether the job resumed from states in memory, and saved none since
        self._known: set[str] = set()
        self._refused: set[str] = set()
        self._writer: threading.Thread | None = None
        self._failure = ""  # of the last save
        self._held = contextlib.ExitStack()  # the lock
        self._memory: Memory | None = None  # of an agent that heals
        self._settings: dict[str, str] = {}
        self._hashes: HashLog | None = None

    # -- resuming -----------------------------------------------------------------------------------------------------
    def resume(self, reset: bool = False) -> Resumed | None:
        """Collective. Resume from the last complete checkpoint; see `load`. Call it once, before the first step.

        Args:
            reset: remove all checkpoints in the folder, and start anew; ranks that `distopt run` or torchrun restart
                resume.

        Returns:
            Where the job resumes; None if it starts anew.

        Raises:
            CheckpointError: the folder cannot be written, another job writes to it, or a rank sees another one.
            StateError: there are checkpoints, but none can be used.
            UsageError: signals are to be handled, and this is not the main thread.
        """
        self._memory = Memory.of_agent(self._communicator, in_shards=self._is_in_shards(self._objects))
        where = Settings.from_env().hash
        if self._root is None and self._memory is None and not where:
            return None
        if self._preemptible and self._preemption is None:
            self._preemption = Preemption(self._communicator)
        try:
            if self._root is not None or where:
                self._settings = settings_of(self._communicator)
            if self._root is not None:
                self._claim(self._root, reset and not DISTOPT_RUN.attempt(os.environ))
            resumed = load_newest(
                self._root and self._source(self._root), self._communicator, adapters_of(self._objects), self._memory
            )
        except BaseException:
            self._abandon()
            raise
        if self._memory is not None:
            self._memory.start(adapters_of(self._objects), *((resumed.step, resumed.epoch) if resumed else (0, 0)))
            self._watch(self._memory.after_forward, self._memory.before_update)
            for thing in self._objects.values():
                if hasattr(thing, "watch_epochs"):
                    thing.watch_epochs(partial(self._set_epoch, thing), partial(self._begin_epoch, thing))
            if resumed is None and DISTOPT_RUN.attempt(os.environ) and self._rank == 0:
                _log.warning("neither memory nor files have the states of all ranks: training begins again from step 0")
        self._root = self._root and self._root.absolute()  # the script may change the working directory
        self._failure = ""
        if resumed is not None:
            self.steps, self.epoch = resumed.step, resumed.epoch
            self._only_in_memory = resumed.folder is None
            if resumed.folder is not None and resumed.folder.parent == self._root:
                self._first = False
                self._names, self._saved = [resumed.folder.name], (resumed.step, resumed.epoch)
            self._refused.update(resumed.refused)
            if self._rank == 0 and self._epoch_is_over():
                _log.warning(
                    "%s was saved after the last batch of its epoch, whose loop gives no more batches; call "
                    "save(epoch + 1) at the end of an epoch",
                    resumed,
                )
        if where != "every" and self._root is not None and self._rank == 0:
            try:
                cut_log(self._root / LOG, self.steps)
            except OSError as error:
                _log.warning("hashes of an earlier run stay: %s", described(error, self._root / LOG))
        if where:
            self._hashes = HashLog(where, self._root, self._communicator, self._settings, resumed is not None)
            self._held.callback(self._hashes.close)
        return resumed

    def _source(self, root: Path) -> Path:
        """The folder to resume from."""
        return root

    def _is_in_shards(self, objects: Mapping[str, Any]) -> bool:
        """Whether states do not depend on the number of ranks, nor on the rank."""
        return any(getattr(thing, "is_in_shards", False) is True for thing in objects.values())

    def _watch(self, after_forward: Callable[[], object], before_update: Callable[[], object]) -> None:
        """Have these functions called in each step."""
        for thing in self._objects.values():
            if hasattr(thing, "watch"):
                thing.watch(after_forward, before_update)

    def _claim(self, root: Path, reset: bool) -> None:
        """Collective. Make sure that this job alone writes to the folder, and that all ranks see it."""
        lock, reason, run = root / ".lock", "", secrets.token_hex(8)
        if self._rank == 0:
            try:
                root.mkdir(parents=True, exist_ok=True)
                self._lock(lock)
                run = f"{run} {socket.gethostname()} {os.getpid()}"
                lock.write_text(run)
                for folder in list_checkpoints(root) if reset else ():
                    remove(folder)
            except BlockingIOError:
                reason = _occupied(lock)
            except OSError as error:
                reason = described(error, root)
        _raise(first_reason(self._communicator, reason))
        run, names = exchanged(self._communicator, [run, sorted(self._objects)])[0]
        try:
            if missing := sorted(self._objects.keys() - set(names)):
                reason = f"it saves {', '.join(missing)}, which rank 0 does not; pass the same objects on all ranks"
            elif lock.read_text() != run:
                reason = f"{root} is not the folder that rank 0 sees; choose one on a file system that all hosts share"
            elif not os.access(root, os.W_OK):
                reason = f"{root} cannot be written; allow this user to write there"
        except OSError as error:
            reason = f"{described(error, root)}, on a file system that all hosts share"
        _raise(first_reason(self._communicator, reason))
        self._run = run.partition(" ")[0]

    def _lock(self, path: Path) -> None:
        try:
            self._held.enter_context(file_lock(path, wait=False))
        except OSError as error:
            # The file system has no locks.
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise

    # -- saving ------------------------------------------------------------------------------------------------------
    def step(self, epoch: int | None = None) -> None:
        """Local, on all ranks. Count a finished training step, and save if it is time to.

        At times collective under `distopt run --heal`, and with `preemptible` about once a second. If a signal has
        reached any rank, all save after the same step, wait until it is written, and leave.

        After the last step of a sampler's epoch, saves and exits wait for the next call of `save`, `step` or `close`:
        the script still has to end the epoch, for example by a schedule, and a job that resumed here would find no
        batches.

        Args:
            epoch: the epoch of the step (default: the last one given).

        Raises:
            Preempted: to end this process, as all others.
        """
        self.steps += 1
        self.epoch = self.epoch if epoch is None else check_integer("epoch", epoch)
        for thing in self._objects.values():
            if hasattr(thing, "finish_step"):
                thing.finish_step()
        self._waits = not self._waits and self._epoch_is_over()  # for one step at most
        self._is_noted, self._begins = not self._waits, None
        if self._memory is not None and self._is_noted:
            self._memory.finish(self.steps, self.epoch)  # before anything collective
        if self._hashes is not None:
            self._hashes.add(self.steps, self.epoch, adapters_of(self._objects))
        if self._preemption is not None:
            self._signum = self._preemption.due() or self._signum
        keeps = self._memory is not None and (self._memory.due(self.steps) or self._epoch_ends())
        self._is_due = self._is_due or bool(self._every and self.steps % self._every == 0)
        if self._waits:
            return
        if self._preemption is not None and self._signum:
            self._leave(self._preemption, self._signum)
        if self._memory is not None and keeps:
            self._memory.keep(self.steps, self.epoch, adapters_of(self._objects))
        if self._is_due:
            self._save()

    def _set_epoch(self, sampler: Any) -> None:
        """Local, on all ranks. The script has set the next epoch of a sampler."""
        is_next = not self._is_noted and sampler.epoch == self.epoch + 1 and not self._epoch_is_over()
        if self._memory is not None and is_next:
            self._memory.note_own()
            self._begins = sampler

    def _begin_epoch(self, sampler: Any) -> None:
        """Local, on all ranks. The script is about to take the first batch, so it has ended the epoch before.

        The job could resume here, from the top of the loop of this epoch, where the script sets it. If own states have
        changed since, as by the step of a schedule, the script would do that twice, or not at all.
        """
        if sampler is self._begins and self._memory is not None:
            self._begins = None
            if self._memory.is_own_as_noted():
                self._is_noted = True
                self._memory.finish(self.steps, sampler.epoch)

    def _epoch_is_over(self) -> bool:
        """Whether a sampler has no batches left."""
        return any(getattr(thing, "epoch_is_over", False) is True for thing in self._objects.values())

    def _epoch_ends(self) -> bool:
        """Whether a sampler has one batch left: from the end of the next step, the job could not resume."""
        return any(getattr(thing, "epoch_ends", False) is True for thing in self._objects.values())

    def save(self, epoch: int | None = None) -> None:
        """Local, on all ranks at the same step. Copy all states; a thread writes them.

        If the last save was of the same step and epoch, this does nothing. A failure to write is reported in one line,
        and earlier checkpoints stay. See `close`.

        Args:
            epoch: the epoch in which the job resumes from this checkpoint (default: the last one given).

        Raises:
            UsageError: before `resume`, after `close`, or an object cannot be saved.
            Preempted: see `step`; a signal has come in the last step of the epoch.
        """
        if epoch is not None:
            self._enter(check_integer("epoch", epoch))
        if self._preemption is not None and self._signum and not self._epoch_is_over():
            self._leave(self._preemption, self._signum)
        self._save()

    def _save(self) -> None:
        self._is_due = self._waits = False
        if self._memory is not None:
            self._memory.keep(self.steps, self.epoch, adapters_of(self._objects))
        if self._root is None:
            return
        if not self._run:
            raise UsageError(
                "Checkpoint.resume has not been called, or close has; resume prepares the folder, so call it first"
            )
        self._wait()
        if self._saved == (self.steps, self.epoch):
            return
        name = name_of(self.steps, *self._names[-1:])
        adapters = adapters_of(self._objects)
        manifest = Manifest(
            save=f"{self._run} {name} of epoch {self.epoch}",
            first=self._first,
            step=self.steps,
            epoch=self.epoch,
            world_size=self._communicator.topology.world_size,
            objects=sorted(adapters),
            versions=self._settings,
        )
        with timeline.span("copy states"):
            shared, own, notes = self._copy(adapters)
        try:
            stamp = manifest.stamp(self._rank, notes)
        except TypeError as error:
            raise UsageError(f"a state can be saved neither as an array nor as JSON: {error}") from None
        self._names, self._saved = [*self._names[-1:], name], (self.steps, self.epoch)
        self._only_in_memory = False
        self._writer = threading.Thread(
            target=self._write, args=(self._root / name, manifest, shared, own, stamp), name="distopt checkpoint"
        )
        self._writer.start()

    def _enter(self, epoch: int) -> None:
        """Set the epoch in which the job resumes. If it is another one, samplers have finished theirs."""
        if epoch != self.epoch:
            self.epoch = epoch
            for thing in self._objects.values():
                if hasattr(thing, "finish_epoch"):
                    thing.finish_epoch()

    def _copy(self, adapters: Mapping[str, Adapter]) -> tuple[Arrays, Arrays, dict[str, Any]]:
        """Copies of the states that this rank writes: its share of the common ones, arrays of its own, and notes."""
        states = snapshot_of(adapters)
        for key, array in (*states.shared.items(), *states.own.items()):
            # It raises here, not in the thread, where training would continue without a save.
            type_of(key.rstrip("/"), array.dtype)
        share = share_of(self._rank, self._communicator.topology.world_size, states.shared)

        def copied(arrays: Arrays) -> Arrays:
            return {key: array if key in states.copies else copy_of(array) for key, array in arrays.items()}

        return copied(share), copied(states.own), states.notes

    def _write(self, folder: Path, manifest: Manifest, shared: Arrays, own: Arrays, stamp: str) -> None:
        try:
            with timeline.span("save", "saves"):
                write_rank(folder, self._rank, manifest, shared, own, stamp)
            self._failure, self._first = "", False
            self._refused.discard(folder.name)
        except Exception as error:
            self._failure = f"step {manifest.step} could not be saved: {described(error, folder)}"
            host = self._communicator.topology.host
            _log.error("rank %d (%s): %s; training continues, older checkpoints stay", self._rank, host, self._failure)
        self._prune(folder.parent, before=self._names[0])

    def _prune(self, root: Path, before: str) -> None:
        if self._rank == 0:
            try:
                prune(root, self._keep, self._known, self._refused, before)
            except OSError as error:
                if not self._failure:  # which has the same cause
                    _log.warning("old checkpoints stay: %s", described(error, root))

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    # -- the end -----------------------------------------------------------------------------------------------------
    def _leave(self, preemption: Preemption, signum: int) -> NoReturn:
        self._save()
        self._preemption = None  # signals remain put off
        saved = "saved"
        try:
            self.close()
        except CheckpointError:  # reported; the job will resume from an older checkpoint
            saved = "not saved"
        raise preemption.leave(signum, f"step {self.steps}, {saved} in {self._root}")

    def close(self) -> None:
        """Collective. Wait until all ranks have written, and release the lock on the folder.

        A job that resumed from states in memory, and saved none since, saves: a failed save may have ended it before. A
        signal that came too late for a step then takes its usual effect.

        Raises:
            CheckpointError: the last save has failed on some rank.
        """
        if self._run and (self._only_in_memory or self._is_due):
            if self._waits:  # the script has nothing left to do in this epoch
                self._enter(self.epoch + 1)
            self._save()
        self._wait()
        if self._root is None or not self._run:
            self._abandon()
            return
        self._run = ""
        reason = first_reason(self._communicator, self._failure)
        if not reason:
            self._prune(self._root, before=max(self._names, default=""))
        late = self._abandon()
        _raise(reason)
        if late:
            signal.raise_signal(late)

    def _abandon(self) -> int:
        """Release the folder and the signals; return the last signal that came, or 0."""
        if self._memory is not None:
            self._memory.close()
        self._held.close()
        preemption, self._preemption = self._preemption, None
        return preemption.stop() if preemption is not None else 0

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may have left
            self._wait()
            self._abandon()


def _occupied(lock: Path) -> str:
    """The error's text for a folder that another Checkpoint has locked."""
    said: list[str] = []
    with contextlib.suppress(OSError):  # the other Checkpoint has just removed it
        said = lock.read_text().split()[1:]
    if said == [socket.gethostname(), str(os.getpid())]:
        return f"another Checkpoint of this process writes to {lock.parent}; close that first, or choose another folder"
    who = f": its rank 0 is process {said[1]} on host {said[0]}" if said else ""
    return f"another job writes checkpoints to {lock.parent}{who}; wait for its end, or choose another folder"


def _raise(reason: str) -> None:
    if reason:
        raise CheckpointError(reason)
