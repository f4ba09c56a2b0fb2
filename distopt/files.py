"""Files that survive a crash: a reader finds the old content or the new, never a part of either."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import safetensors

from .errors import StateError, UsageError

Arrays: TypeAlias = "dict[str, np.ndarray[Any, Any]]"

_CURES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or raise your quota",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EACCES: "allow this user to write there",
    errno.EPERM: "allow this user to write there",
    errno.EROFS: "mount it for writing",
}

# Names of types in safetensors files, by NumPy's kind and size.
_TYPES = {"b1": "BOOL", **{f"{kind}{size}": f"{kind.upper()}{8 * size}" for kind in "iu" for size in (1, 2, 4, 8)}}
_TYPES |= {f"f{size}": f"F{8 * size}" for size in (2, 4, 8)}


def type_of(key: str, array: Any) -> str:
    """Local. What safetensors files call the type of an array.

    Raises:
        UsageError: they have no such type.
    """
    if (known := _TYPES.get(array.dtype.str[1:])) is None:
        raise UsageError(f"{key} has dtype {array.dtype}, which safetensors files do not know; convert it")
    return known


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Local. Replace the file `path` by the body's output, all of it or nothing.

    The body writes to `.NAME.<16 hex digits>.tmp` in the same folder; after it, that file is flushed to the disk and
    renamed. If the body raises, the old file stays and the temporary one is removed. A writer that was killed leaves
    its temporary file, which the next write to the same path removes. Writers may run at the same time, in threads or
    processes: the last to finish wins. A symbolic link is followed. New files get the permissions of the umask.

    Args:
        path: file to replace or create; its folder must exist.

    Yields:
        The temporary file, open for reading and writing bytes.

    Raises:
        OSError: from the file system; the old file stays.
    """
    target = Path(os.path.realpath(path))
    _remove_orphans(target)
    temporary, file = _open_temporary(target)
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(target.parent)  # the rename itself lasts only once the folder is on the disk


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Local. Flush the names in a folder to the disk.

    Raises:
        OSError: from the file system.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def file_lock(path: str | os.PathLike[str], wait: bool = True) -> Iterator[None]:
    """Local. Hold the lock file `path` during the body; other processes and threads wait for it.

    The kernel releases the lock when its holder dies. The empty lock file stays: to remove it would let a process
    that waits on the removed file and one that creates it again each hold a lock.

    Args:
        path: the lock file; it is created.
        wait: whether to wait for another holder.

    Raises:
        BlockingIOError: another holds the lock, and `wait` is False.
        OSError: the file cannot be created or its file system has no locks.
    """
    with Path(path).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


# -- arrays -----------------------------------------------------------------------------------------------------------
def save_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray[Any, Any]],
    mark: Mapping[str, str],
    notes: str = "",
) -> None:
    """Local. Write a safetensors file with checksums of its content; see `atomic_write`.

    Contiguous arrays are written from where they are: the function needs no memory of their size.

    Args:
        path: file to replace or create.
        arrays: NumPy arrays by name.
        mark: metadata that identifies the format to the reader.
        notes: text to save with the arrays.

    Raises:
        UsageError: safetensors has no such dtype.
        OSError: from the file system; an older file stays.
    """
    little = {key: np.asarray(array, array.dtype.newbyteorder("<"), order="C") for key, array in arrays.items()}
    # Larger items first, which aligns all of them, as safetensors' own writer does.
    little = dict(sorted(little.items(), key=lambda item: (-item[1].itemsize, item[0])))
    header: dict[str, Any] = {}
    end = 0
    for key, array in little.items():
        dtype = type_of(key, array)
        begin, end = end, end + array.nbytes
        header[key] = {"dtype": dtype, "shape": array.shape, "data_offsets": [begin, end]}
    header["__metadata__"] = {**mark, **({"notes": notes} if notes else {}), "crc32": _checksums(little, notes)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in little.values():
            file.write(array.data)


def load_arrays(
    path: str | os.PathLike[str], mark: Mapping[str, str], writer: str, prefix: str = ""
) -> tuple[Arrays, str]:
    """Local. The arrays and the notes that `save_arrays` wrote with the same `mark`.

    Args:
        path: file to read.
        mark: see `save_arrays`.
        writer: the writer of files with this mark, for the message.
        prefix: read only the arrays whose names begin with this.

    Raises:
        StateError: the file is truncated, corrupt or of another writer.
        FileNotFoundError: there is no such file.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            check_mark(path, metadata, mark, writer)
            names = list(file.keys())
            arrays = {key: file.get_tensor(key) for key in names if key.startswith(prefix)}
    except (safetensors.SafetensorError, AttributeError, TypeError) as error:  # the last two: types NumPy lacks
        raise StateError(f"{path} is truncated or not a file of states: {error}") from None
    notes = metadata.get("notes", "")
    try:
        saved = json.loads(metadata["crc32"])
        right = saved.keys() == {"", *names} and json.loads(_checksums(arrays, notes)).items() <= saved.items()
    except (KeyError, ValueError, AttributeError):
        right = False
    if not right:
        raise StateError(f"{path} is corrupt: its content does not have the checksums that were saved with it")
    return arrays, notes


def check_mark(path: str | os.PathLike[str], found: Mapping[str, Any], mark: Mapping[str, str], writer: str) -> None:
    """Local. Check that a file is of the writer, and of the version of its format that is read here.

    Args:
        path: of the file, for the message.
        found: its metadata.
        mark: see `save_arrays`; its key "version" is the version of the format.
        writer: see `load_arrays`.

    Raises:
        StateError: it is of another writer or version.
    """
    differ = {key for key, value in mark.items() if found.get(key) != value}
    if differ == {"version"} and found.get("version") is not None:
        raise StateError(
            f"{path} has version {found['version']} of its format, and this distopt reads version {mark['version']}; "
            "use the version of distopt that wrote it"
        )
    if differ:
        raise StateError(f"{path} was not written by {writer}")


def _checksums(arrays: Mapping[str, np.ndarray[Any, Any]], notes: str) -> str:
    """CRC-32 of each array, and of the notes, as JSON.

    They detect damage, not forgery: a digest against that would cost five times as much.
    """
    checksums = {"": zlib.crc32(notes.encode())}
    for key, array in arrays.items():
        checksum = zlib.crc32(f"{key} {array.dtype.str} {array.shape} ".encode())
        checksums[key] = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return json.dumps(checksums)


# -- temporary files --------------------------------------------------------------------------------------------------
def temporary_pattern(name: str) -> str:
    """Local. A regular expression of the names of `atomic_write`'s temporary files for those that match `name`."""
    return rf"\.(?:{name})\.[0-9a-f]{{16}}\.tmp"


def _open_temporary(target: Path) -> tuple[Path, BinaryIO]:
    """A new temporary file, marked as in use by a lock where the file system has locks."""
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        file = temporary.open("x+b")
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()  # another writer took it for an orphan before it was locked


def _remove_orphans(target: Path) -> None:
    """Remove the temporary files of writers to `target` that no longer run."""
    pattern = re.compile(temporary_pattern(re.escape(target.name)))
    for entry in target.parent.iterdir():
        if not pattern.fullmatch(entry.name):
            continue
        # It is locked, has been finished since, or the file system has no locks: then it stays.
        with contextlib.suppress(OSError), entry.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            entry.unlink()


def described(error: Exception, path: Path) -> str:
    """Local. The error that a file or folder at `path` has met, with its place and the cure."""
    if not isinstance(error, OSError):
        return f"{path}: {error!r}"
    cure = _CURES.get(error.errno or 0, "check the disk")
    return f"{error.filename or path}: {error.strerror or error}; {cure}, or choose another folder"
