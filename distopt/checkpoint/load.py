"""Going on from a checkpoint: every rank reads and checks, all agree, and only then anything changes."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..comm.single import SingleCommunicator
from ..comm.world import current
from ..errors import StateError
from ..launch.topology import Topology
from .folder import Manifest, list_checkpoints, read_manifest, read_rank, read_shared, survey
from .merge import Mean, Stream
from .parts import State, copy_of, of_device, parts_of

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from ..comm import Communicator
    from ..files import Arrays
    from .parts import Part

__all__ = ["Resumed", "communicator_of", "first_reason", "load"]

log = logging.getLogger("distopt")


@dataclass(frozen=True)
class Resumed:
    """Where a job goes on from.

    Attributes:
        folder: the checkpoint.
        step: number of training steps that were finished.
        epoch: what the script had said.
        world_size: number of ranks that saved.
        refused: names of newer checkpoints that could not be used.
    """

    folder: Path
    step: int
    epoch: int
    world_size: int
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.folder} (step {self.step}, epoch {self.epoch})"


def load(folder: str | os.PathLike[str], communicator: Communicator | None = None, **objects: Any) -> Resumed | None:
    """Collective. Set `objects` to the newest whole checkpoint in `folder`; see `Checkpoint` for what they can be.

    Nothing on the disk changes. A checkpoint may hold more objects than are asked for, so a model can be loaded alone.
    One that is damaged, incomplete or does not fit is refused, with a warning on rank 0, and the one before is tried.

    Args:
        folder: where the checkpoints are; the same for all ranks.
        communicator: of the ranks (default: that of the first object that has one, else of `distopt.init`).
        objects: what to set, by the names under which it was saved.

    Returns:
        Where the job goes on from; None if there is no checkpoint, or only one that has never been completed.

    Raises:
        StateError: there are checkpoints, but none can be used; nothing was changed.
        UsageError: an object cannot be loaded.
    """
    root, parts = Path(folder), parts_of(objects)
    communicator = communicator_of(objects) if communicator is None else communicator
    rank = communicator.topology.rank
    refused: list[str] = []
    names: list[str] = json.loads(communicator.all_gather_bytes(json.dumps(_names(root, rank)).encode())[0])
    common = _common(communicator, parts) if names else set()
    for name in reversed(names):
        reason, states, manifest = "", {}, None
        try:
            manifest = read_manifest(root / name)
            states = _read(root / name, manifest, parts, communicator.topology, common)
            for key, state in states.items():
                parts[key].check(state)
        except (StateError, OSError) as error:
            reason = str(error)
        reason = first_reason(communicator, reason)
        if not reason and manifest is not None:
            for key, state in states.items():
                parts[key].put(state)
            _tell_changes(root / name, manifest, communicator.topology)
            return Resumed(root / name, manifest.step, manifest.epoch, manifest.world_size, tuple(refused))
        refused.append(name)
        if rank == 0:
            log.warning("checkpoint %s is refused: %s", root / name, reason)
    # Rank 0 looks for all ranks, which must not come to different conclusions.
    begun = rank == 0 and bool(names) and survey(root / names[-1]).begun
    if not names or communicator.all_gather_bytes(bytes([begun]))[0] == b"\1":
        return None
    raise StateError(
        f"none of the {len(names)} checkpoints in {root} can be used, the oldest because {reason}; choose another "
        "folder, or remove them by Checkpoint.resume(reset=True), which is --reset in the examples"
    )


def communicator_of(objects: Mapping[str, Any]) -> Communicator:
    """Local. That of the first object that has one, else that of `distopt.init`, else that of a job of one rank."""
    found: Communicator | None = next((x.communicator for x in objects.values() if hasattr(x, "communicator")), None)
    if found is None and (world := current()):
        found = world.communicator
    return found or SingleCommunicator(Topology.of_one_host(0, 1, socket.gethostname()))


def first_reason(communicator: Communicator, reason: str) -> str:
    """Collective. The first reason that any rank gives, with its rank and host, or nothing if none does."""
    topology = communicator.topology
    for rank, said in enumerate(communicator.all_gather_bytes(reason.encode())):
        if said:
            where = f"rank {rank} ({topology.hosts[rank]}): " if topology.world_size > 1 else ""
            return where + said.decode()
    return ""


def _names(root: Path, rank: int) -> list[str]:
    """Names of the checkpoints, by step; rank 0 looks for all ranks."""
    return [folder.name for folder in list_checkpoints(root)] if rank == 0 else []


def _common(communicator: Communicator, parts: Mapping[str, Part]) -> set[str]:
    """Collective. Names of the random generators that the ranks have seeded alike."""
    seeds = {name: _digest(part.look()) for name, part in parts.items() if part.random}
    gathered = [json.loads(text) for text in communicator.all_gather_bytes(json.dumps(seeds).encode())]
    return {name for name in seeds if all(other.get(name) == gathered[0].get(name) for other in gathered)}


def _digest(state: State) -> str:
    digest = hashlib.blake2b(json.dumps(state.notes).encode())
    for array in state.arrays.values():
        digest.update(copy_of(array).data)
    return digest.hexdigest()


def _read(
    folder: Path, manifest: Manifest, parts: Mapping[str, Part], topology: Topology, common: set[str]
) -> dict[str, State]:
    """The states for this rank, by the names of `parts`; a generator that stays as it is has none."""
    absent = parts.keys() - set(manifest.objects)
    if wanted := sorted(name for name in absent if not of_device(name)):
        raise StateError(f"it has no {wanted[0]}; it is of another script")
    parts = {name: part for name, part in parts.items() if name not in absent}
    shared: Arrays = {}
    for rank in range(manifest.world_size):
        shared |= read_shared(folder, manifest, rank)
    if manifest.world_size == topology.world_size:
        return _by_part(parts, shared, *read_rank(folder, manifest, topology.rank))
    merges = {name: Stream(topology.rank, name in common) if part.random else Mean() for name, part in parts.items()}
    for rank in range(manifest.world_size):
        of_rank = _by_part(parts, {}, *read_rank(folder, manifest, rank))
        for name, merge in merges.items():
            merge.add(of_rank[name])
    states = {}
    for name, merge in merges.items():
        merged = merge.result()
        if merged is not None:
            states[name] = State({**_under(name, shared), **merged.arrays}, merged.notes)
    return states


def _by_part(parts: Mapping[str, Part], shared: Arrays, own: Arrays, notes: dict[str, Any]) -> dict[str, State]:
    arrays = {**shared, **own}
    return {name: State(_under(name, arrays), notes.get(name, {})) for name in parts}


def _under(name: str, arrays: Arrays) -> Arrays:
    return {key.partition("/")[2]: array for key, array in arrays.items() if key.partition("/")[0] == name}


def _tell_changes(folder: Path, manifest: Manifest, topology: Topology) -> None:
    before, now = manifest.world_size, topology.world_size
    if before == now or topology.rank:
        return
    new = f", rank {before} and above draw random numbers of their own" if now > before else ""
    log.warning(
        "%s was saved by %d ranks and goes on with %d: what each rank had of its own, such as residuals, becomes the "
        "mean over the %d%s, and the rest of the epoch's samples is dealt out anew",
        folder, before, now, before, new,
    )  # fmt: skip
