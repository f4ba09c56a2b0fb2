"""Checkpoints as files. See 'Checkpoints and healing' in the documentation for the format.

Every rank writes its own file, atomically, and without waiting for others. A checkpoint is complete when all files
of its manifest exist and name the same save.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import StateError
from ..files import atomic_write, check_mark, load_arrays, save_arrays, sync_folder, temporary_pattern

if TYPE_CHECKING:
    from ..files import Arrays

MANIFEST = "checkpoint.json"
MARK = {"format": "distopt checkpoint", "version": "1"}
WRITER = "distopt.checkpoint"
_NAME = re.compile(r"step-\d{10}(?:-\d{4})?")
SHARED, OWN = "shared/", "own/"  # prefixes of the names of arrays in files
_FILE = rf"{re.escape(MANIFEST)}|rank-\d{{5,}}\.safetensors"
_OURS = re.compile(rf"{_FILE}|{temporary_pattern(_FILE)}")


class MissingFileError(StateError):
    """A file of a checkpoint is not there: not yet, or no longer."""


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint, which rank 0 writes.

    Attributes:
        save: names this save: files of two saves never form one checkpoint.
        first: whether this is the first checkpoint.
        step: number of finished training steps.
        epoch: as the script gave it.
        world_size: number of ranks that saved.
        objects: names of the saved objects.
        versions: of the software, and other settings, for people and `distopt diff`; see `hashes.settings_of`.
    """

    save: str
    first: bool
    step: int
    epoch: int
    world_size: int
    objects: list[str]
    versions: dict[str, str]

    def stamp(self, rank: int, notes: dict[str, Any]) -> str:
        """JSON that marks a file as written by a rank of this save, with the notes."""
        return json.dumps({"save": self.save, "first": self.first, "rank": rank, "notes": notes})


def name_of(step: int, last: str = "") -> str:
    """Name of the folder of a checkpoint after `step` steps; it differs from `last`. Names sort by age."""
    name = f"step-{step:010d}"
    if not last.startswith(name):
        return name
    return f"{name}-{int(last[len(name) + 1 :] or 0) + 1:04d}"


def rank_file(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def share_of(rank: int, world_size: int, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The common arrays that this rank writes: about as many bytes as each other rank.

    Args:
        rank: this rank.
        world_size: number of ranks.
        arrays: those that all ranks have.
    """
    loads = [0] * world_size
    mine = {}
    for name, array in sorted(arrays.items(), key=lambda item: (-item[1].nbytes, item[0])):
        least = loads.index(min(loads))
        loads[least] += array.nbytes
        if least == rank:
            mine[name] = array
    return mine


# -- writing ----------------------------------------------------------------------------------------------------------
def write_rank(folder: Path, rank: int, manifest: Manifest, shared: Arrays, own: Arrays, stamp: str) -> None:
    """Write the file of one rank; rank 0 writes the manifest too, last.

    Args:
        folder: of this checkpoint.
        rank: whose file to write.
        manifest: the same on all ranks.
        shared: this rank's share of the arrays that are the same on all ranks.
        own: arrays of this rank.
        stamp: of the manifest, with the notes of this rank.

    Raises:
        OSError: from the file system.
    """
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
    arrays = {prefix + key: array for prefix, group in ((SHARED, shared), (OWN, own)) for key, array in group.items()}
    save_arrays(folder / rank_file(rank), arrays, MARK, stamp)
    if rank == 0:
        content = asdict(manifest)
        with atomic_write(folder / MANIFEST) as file:
            file.write(json.dumps({**MARK, **content, "blake2b": _digest(content)}, indent=1).encode() + b"\n")


# -- reading ----------------------------------------------------------------------------------------------------------
def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        StateError: it is corrupt or foreign.
        OSError: from the file system.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        check_mark(path, {key: content.pop(key, None) for key in MARK}, MARK, WRITER)
        if content.pop("blake2b") != _digest(content):
            raise StateError(f"{path} is corrupt: its content does not have the digest that was saved with it")
        return Manifest(**content)
    except StateError:
        raise
    except FileNotFoundError:
        raise _missing(path) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{path} is truncated or no manifest of a checkpoint: {error!r}") from None


def read_shared(folder: Path, manifest: Manifest, rank: int) -> Arrays:
    """The share, written by `rank`, of the arrays that are the same on all ranks.

    Raises:
        StateError: the file is damaged, or of another save or rank.
        OSError: from the file system.
    """
    return _read(folder, manifest, rank, SHARED)[0]


def read_rank(folder: Path, manifest: Manifest, rank: int) -> tuple[Arrays, dict[str, Any]]:
    """The arrays of its own that `rank` has written, and its notes; see `read_shared`."""
    return _read(folder, manifest, rank, OWN)


def _read(folder: Path, manifest: Manifest, rank: int, prefix: str) -> tuple[Arrays, dict[str, Any]]:
    path = folder / rank_file(rank)
    try:
        arrays, notes = load_arrays(path, MARK, WRITER, prefix)
    except FileNotFoundError:
        raise _missing(path) from None
    stamp = json.loads(notes)
    if stamp["save"] != manifest.save:
        raise StateError(
            f"{path} is of another save than {MANIFEST} beside it; the writer was ended in between, or ranks gave "
            "different epochs"
        )
    if (saved := stamp["rank"]) != rank:
        raise StateError(f"{path} is the file of rank {saved}; files of ranks have been exchanged or copied")
    return under_prefix(prefix, arrays), stamp["notes"]


def under_prefix(prefix: str, arrays: Arrays) -> Arrays:
    """The arrays whose names begin with a prefix, without it."""
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}


def _missing(path: Path) -> MissingFileError:
    return MissingFileError(f"{path} is missing; the job ended before all files were written")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


# -- housekeeping -----------------------------------------------------------------------------------------------------
class Survey(NamedTuple):
    """The state of a checkpoint's files, found without reading their arrays.

    Attributes:
        whole: whether all files are there, of one save.
        begun: whether some are missing, and the others are marked as the first checkpoint.
    """

    whole: bool
    begun: bool


def survey(folder: Path) -> Survey:
    """The content of a folder, without a look into the files of ranks.

    Raises:
        OSError: the folder cannot be read.
    """
    present = _entries(folder)
    expected = {name for name in present if re.fullmatch(_FILE, name)}
    stamps: list[tuple[str, bool]] = []
    try:
        if MANIFEST in present:
            manifest = read_manifest(folder)
            expected = {MANIFEST, *map(rank_file, range(manifest.world_size))}
            stamps.append((manifest.save, manifest.first))
        for name in expected & present - {MANIFEST}:
            stamp = json.loads(load_arrays(folder / name, MARK, WRITER, None)[1])
            stamps.append((stamp["save"], stamp["first"]))
    except (OSError, StateError, ValueError, KeyError, TypeError):
        return Survey(whole=False, begun=False)
    whole = MANIFEST in present and expected <= present and len({save for save, _ in stamps}) == 1
    return Survey(whole, begun=not whole and all(first for _, first in stamps))


def list_checkpoints(root: Path) -> list[Path]:
    """The folders of checkpoints, complete or not, by step; other files and folders are ignored.

    Raises:
        OSError: `root` cannot be read. A folder that does not exist has no checkpoints.
    """
    return [folder for folder in _folders(root) if any(re.fullmatch(_FILE, name) for name in _entries(folder))]


def _entries(folder: Path) -> set[str]:
    """The names in a folder; none if the job that writes there has just removed it."""
    try:
        return {entry.name for entry in folder.iterdir()}
    except FileNotFoundError:
        return set()


def _folders(root: Path) -> list[Path]:
    if not root.exists():
        return []
    return sorted(entry for entry in root.iterdir() if _NAME.fullmatch(entry.name) and entry.is_dir())


def prune(root: Path, keep: int, known: set[str], refused: set[str], before: str) -> None:
    """Remove all but the last `keep` whole checkpoints.

    An incomplete one is removed if a newer one is whole, or if it is older than `before`: no rank writes to it now.

    Args:
        root: folder of the checkpoints.
        keep: how many to keep.
        known: names of those that are known to be whole; this adds to them.
        refused: names of those that are of no use, though they look whole.
        before: see above.

    Raises:
        OSError: from the file system.
    """
    folders = _folders(root)
    for folder in folders:
        if folder.name not in known | refused and survey(folder).whole:
            known.add(folder.name)
    whole = [folder for folder in folders if folder.name in known]
    newest = whole[-1].name if whole else ""
    for folder in folders:
        useless = folder.name not in known and folder.name < max(newest, before)
        if useless or folder in whole[:-keep]:
            remove(folder)
            known.discard(folder.name)


def remove(folder: Path) -> None:
    """Remove the files of a checkpoint and, if nothing else is in it, the folder.

    Raises:
        OSError: from the file system.
    """
    names = [entry.name for entry in folder.iterdir() if _OURS.fullmatch(entry.name)]
    for name in sorted(names, key=lambda name: name != MANIFEST):  # without it, the rest is not a checkpoint
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other files are in it
        folder.rmdir()
