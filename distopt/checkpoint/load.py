"""Resuming from a checkpoint: every rank reads and checks, all agree, and only then does anything change."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..comm.single import SingleCommunicator
from ..comm.world import current
from ..errors import StateError
from ..launch.job.topology import Topology
from .adapters import State, adapters_of, copy_of, exchanged, of_device
from .folder import (
    MANIFEST,
    Manifest,
    MissingFileError,
    list_checkpoints,
    name_of,
    read_manifest,
    read_rank,
    read_shared,
    survey,
)
from .merge import by_adapter, merged, named, under

if TYPE_CHECKING:
    from ..files import Arrays
    from .adapters import Adapter, Ranks
    from .memory import Memory

_LISTINGS = 100  # of a folder where another job saves and removes checkpoints while this one reads

_log = logging.getLogger("distopt")


@dataclass(frozen=True)
class Resumed:
    """Where a job resumes.

    Attributes:
        folder: the checkpoint; None for states that an agent of `distopt run --heal` has kept.
        step: number of training steps that were finished.
        epoch: as the script gave it.
        world_size: number of ranks that saved.
        refused: names of newer checkpoints that could not be used.
    """

    folder: Path | None
    step: int
    epoch: int
    world_size: int
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.folder or 'memory'} (step {self.step}, epoch {self.epoch})"


def load(folder: str | os.PathLike[str], communicator: Ranks | None = None, **objects: Any) -> Resumed | None:
    """Collective. Set `objects` to the newest complete checkpoint in `folder`; see `Checkpoint` for what they can be.

    Nothing on the disk changes. A checkpoint may hold more objects than are asked for, so a model can be loaded alone.
    A damaged or unsuitable one is refused, with a warning on rank 0, and the previous one is tried. Another job may be
    saving to the folder: a checkpoint that it has not finished, or has just removed, is passed over.

    Args:
        folder: where the checkpoints are; the same for all ranks.
        communicator: of the ranks (default: that of the first object that has one, else of `distopt.init`).
        objects: the objects to set, by the names under which they were saved.

    Returns:
        Where the job resumes; None without a complete checkpoint.

    Raises:
        StateError: there are checkpoints, but none can be used; nothing was changed.
        UsageError: an object cannot be loaded.
    """
    communicator = ranks_of(objects) if communicator is None else communicator
    adapters, root = adapters_of(objects), Path(folder)
    names, begun, whole = _found(root, communicator)
    for _ in range(_LISTINGS):
        common = _common(communicator, adapters) if names else set()
        resumed, reason = _newest_usable(root, names, communicator, adapters, common, beside=True)
        if resumed is not None:
            return resumed
        before = names, begun, whole
        names, begun, whole = _found(root, communicator)
        if (names, begun, whole) == before:
            break
    if begun or not names:
        return None
    raise StateError(f"none of the {len(names)} checkpoints in {root} can be used, the oldest because {reason}")


def load_newest(
    root: Path | None, communicator: Ranks, adapters: Mapping[str, Adapter], memory: Memory | None
) -> Resumed | None:
    """Collective. As `load`, for the job that writes to the folder; the states in `memory` go first if not older."""
    names, begun, _ = ([], False, []) if root is None else _found(root, communicator)
    label, topology = memory.agree() if memory is not None else None, communicator.topology
    reason = ""
    refused: list[str] = []
    resized = label is not None and label.world_size != topology.world_size
    common = _common(communicator, adapters) if names or resized else set()
    if root is not None:
        newer = [name for name in names if label is None or name >= name_of(label.step + 1)]
        resumed, reason = _newest_usable(root, newer, communicator, adapters, common)
        if resumed is not None:
            return resumed
        refused = newer[::-1]
    if memory is not None and label is not None:
        shared, owns = memory.read(label)
        states = _checked(adapters, _of_rank(adapters, label.world_size, shared, owns, topology, common))
        for key, state in states.items():
            adapters[key].put(state)
        _log_changes("memory", label.world_size, topology)
        return Resumed(None, label.step, label.epoch, label.world_size, tuple(refused))
    if begun or not names:
        return None
    raise StateError(
        f"none of the {len(names)} checkpoints in {root} can be used, the oldest because {reason}; choose another "
        "folder, or remove them by Checkpoint.resume(reset=True), which is --reset in the examples"
    )


def _newest_usable(
    root: Path,
    names: list[str],
    communicator: Ranks,
    adapters: Mapping[str, Adapter],
    common: set[str],
    beside: bool = False,
) -> tuple[Resumed | None, str]:
    """Collective. Resume from the last of these checkpoints that can be used.

    Args:
        root: their folder.
        names: of them, by step.
        communicator: of the ranks.
        adapters: of the objects, by name.
        common: see `merged`.
        beside: whether another job may write there; then a missing file is not a fault.

    Returns:
        Where the job resumes, if one can be used, and why the last one tried cannot.
    """
    topology, reason = communicator.topology, ""
    refused: list[str] = []
    for name in reversed(names):
        states, manifest, own, missing = {}, None, "", False
        try:
            manifest = read_manifest(root / name)
            states = _read(root / name, manifest, adapters, topology, common)
        except (StateError, OSError) as error:
            own, missing = str(error), isinstance(error, (MissingFileError, FileNotFoundError))
        reason = first_reason(communicator, own)
        if not reason and manifest is not None:
            for key, state in states.items():
                adapters[key].put(state)
            _log_changes(str(root / name), manifest.world_size, topology)
            return Resumed(root / name, manifest.step, manifest.epoch, manifest.world_size, tuple(refused)), ""
        if beside and any(exchanged(communicator, missing)):
            continue
        refused.append(name)
        if topology.rank == 0:
            _log.warning("checkpoint %s is refused: %s", root / name, reason)
    return None, reason


def ranks_of(objects: Mapping[str, Any]) -> Ranks:
    """The communicator of the first object with one, else of `distopt.init`, else of a job of one rank."""
    found: Ranks | None = next((x.communicator for x in objects.values() if hasattr(x, "communicator")), None)
    if found is None and (world := current()):
        found = world.communicator
    return found or SingleCommunicator(Topology.of_one_host(0, 1, socket.gethostname()))


def first_reason(communicator: Ranks, reason: str) -> str:
    """Collective. The first reason that any rank gives, with its rank and host, or nothing if none does."""
    topology = communicator.topology
    for rank, said in enumerate(exchanged(communicator, reason)):
        if said:
            return f"rank {rank} ({topology.hosts[rank]}): {said}" if topology.world_size > 1 else str(said)
    return ""


def _found(root: Path, communicator: Ranks) -> tuple[list[str], bool, list[bool]]:
    """Collective. The checkpoints in a folder; rank 0 looks for all ranks, so that they come to the same conclusions.

    Returns:
        Their names, by step; whether the last is a first one that was only begun; and which have a manifest, which
        another job changes by finishing one, and by removing one.
    """
    names: list[str] = []
    whole: list[bool] = []
    begun, reason = False, ""
    if communicator.topology.rank == 0:
        try:
            names = [folder.name for folder in list_checkpoints(root)]
            begun = bool(names) and survey(root / names[-1]).begun
            whole = [(root / name / MANIFEST).is_file() for name in names]
        except OSError as error:
            reason = f"{root} cannot be read: {error}; allow this user to read it"
    names, begun, whole, reason = exchanged(communicator, [names, begun, whole, reason])[0]
    if reason:
        raise StateError(reason)
    return names, begun, whole


def _common(communicator: Ranks, adapters: Mapping[str, Adapter]) -> set[str]:
    """Collective. Names of the random generators that all ranks have seeded equally."""
    seeds = {name: _digest(adapter.snapshot()) for name, adapter in adapters.items() if adapter.random}
    gathered = exchanged(communicator, seeds)
    return {name for name in seeds if all(other.get(name) == gathered[0].get(name) for other in gathered)}


def _digest(state: State) -> str:
    digest = hashlib.blake2b(json.dumps(state.notes).encode())
    for array in state.arrays.values():
        digest.update(copy_of(array).data)
    return digest.hexdigest()


def _read(
    folder: Path, manifest: Manifest, adapters: Mapping[str, Adapter], topology: Topology, common: set[str]
) -> dict[str, State]:
    """The states for this rank, checked, by the names of `adapters`; a generator that does not change has none."""
    absent = adapters.keys() - set(manifest.objects)
    if wanted := sorted(name for name in absent if not of_device(name)):
        of = "version of distopt" if wanted[0].startswith("generators.") else "script"
        raise StateError(f"it has no {wanted[0]}; it is of another {of}")
    adapters = {name: adapter for name, adapter in adapters.items() if name not in absent}
    shared: Arrays = {}
    for rank in range(manifest.world_size):
        shared |= read_shared(folder, manifest, rank)
    before = manifest.world_size
    ranks = [topology.rank] if before == topology.world_size else range(before)
    owns = (read_rank(folder, manifest, rank) for rank in ranks)
    return _checked(adapters, _of_rank(adapters, before, shared, owns, topology, common))


def _of_rank(
    adapters: Mapping[str, Adapter],
    before: int,
    shared: Arrays,
    owns: Iterable[tuple[Arrays, dict[str, Any]]],
    topology: Topology,
    common: set[str],
) -> dict[str, State]:
    """The states for this rank, from shared arrays and from arrays and notes of this rank, or of all `before`."""
    if before == topology.world_size:
        return by_adapter(adapters, shared, *next(iter(owns)))
    states = merged(owns, adapters, topology.rank, common)
    return {name: State({**under(name, shared), **own.arrays}, own.notes) for name, own in states.items()}


def _checked(adapters: Mapping[str, Adapter], states: dict[str, State]) -> dict[str, State]:
    """`states`, if `adapters` can resume from them; else raises a StateError that names the object."""
    for name, state in states.items():
        with named(name):
            adapters[name].check(state)
    return states


def _log_changes(place: str, before: int, topology: Topology) -> None:
    now = topology.world_size
    if before == now or topology.rank:
        return
    new = f", rank {before} and above draw random numbers of their own" if now > before else ""
    _log.warning(
        "%s was saved by %d ranks and resumes with %d: the states of each rank, such as residuals, become their "
        "mean over the %d%s, and the remaining samples of the epoch are dealt out again",
        place, before, now, before, new,
    )  # fmt: skip
