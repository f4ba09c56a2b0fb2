"""Files that survive a crash: a reader finds the old content or the new, never a part of either."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import mmap
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeAlias

import numpy as np

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
_DTYPES = {name: np.dtype(f"<{kind}") for kind, name in _TYPES.items()}


def type_of(key: str, dtype: Any) -> str:
    """The name of the type of an array in safetensors files.

    Raises:
        UsageError: they have no such type.
    """
    if (known := _TYPES.get(dtype.str[1:])) is None:
        raise UsageError(f"{key} has dtype {dtype}, which safetensors files do not know; convert it")
    return known


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Replace the file `path` by the body's output, all of it or nothing.

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
    """Flush the names in a folder to the disk.

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
    """Hold the lock file `path` during the body; other processes and threads wait for it.

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
    """Write a safetensors file with checksums of its content; see `atomic_write` and `write_arrays`.

    Raises:
        UsageError: see `head_of`.
        OSError: from the file system; an older file stays.
    """
    little = {key: np.asarray(array, _DTYPES[type_of(key, array.dtype)], order="C") for key, array in arrays.items()}
    with atomic_write(path) as file:
        write_arrays(file, little, {**mark, "crc32": _checksums(little, notes)}, notes)


def write_arrays(
    file: IO[bytes],
    arrays: Mapping[str, Any],
    mark: Mapping[str, str],
    notes: str = "",
    host: Callable[[Any], Any] = np.asarray,
) -> None:
    """Write a safetensors file.

    Contiguous arrays are written from where they are: the function needs no memory of their size.

    Args:
        file: where to write.
        arrays: arrays of NumPy or CuPy by name.
        mark: metadata that identifies the format to the reader.
        notes: text to save with the arrays.
        host: brings an array to memory of the host, one at a time.

    Raises:
        UsageError: safetensors has no such dtype.
        OSError: from the file system.
    """
    head, order = head_of(arrays, mark, notes)
    file.write(head)
    for key, dtype in order:
        file.write(np.asarray(host(arrays[key]), dtype, order="C").data)


def head_of(
    arrays: Mapping[str, Any], mark: Mapping[str, str], notes: str = ""
) -> tuple[bytes, Sequence[tuple[str, Any]]]:
    """The bytes of a safetensors file before its arrays, and the names and types of these, in their order there.

    Args and errors are those of `write_arrays`.
    """
    order, described = _layout(tuple((key, array.dtype, array.shape) for key, array in arrays.items()))
    metadata = {**mark, "notes": notes} if notes else mark
    text = f'{{{described}"__metadata__": {json.dumps(metadata)}}}'.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def load_arrays(
    path: str | os.PathLike[str], mark: Mapping[str, str], writer: str, prefix: str | None = ""
) -> tuple[Arrays, str]:
    """The arrays and the notes that `save_arrays` wrote with the same `mark`.

    Args:
        path: file to read.
        mark: see `write_arrays`.
        writer: the writer of files with this mark, for the message.
        prefix: read only the arrays whose names begin with this; None: no arrays.

    Raises:
        StateError: the file is truncated, corrupt or of another writer.
        FileNotFoundError: there is no such file.
    """
    with Path(path).open("rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        content = memoryview(mmap.mmap(file.fileno(), n_bytes, prot=mmap.PROT_READ) if n_bytes else b"")
    views, metadata = arrays_in(content, mark, writer, os.fspath(path))
    arrays = {key: view.copy() for key, view in views.items() if prefix is not None and key.startswith(prefix)}
    notes = metadata.get("notes", "")
    try:
        saved = json.loads(metadata["crc32"])
        right = saved.keys() == {"", *views} and json.loads(_checksums(arrays, notes)).items() <= saved.items()
    except (KeyError, ValueError, AttributeError, TypeError):
        right = False
    if not right:
        raise StateError(f"{path} is corrupt: its content does not have the checksums that were saved with it")
    return arrays, notes


def arrays_in(
    content: bytes | memoryview, mark: Mapping[str, str], writer: str, place: str = "memory"
) -> tuple[Arrays, dict[str, Any]]:
    """Views of the arrays in the content of a safetensors file, and its metadata.

    Args:
        content: of the file; where it can be written, the views can be, too.
        mark: see `write_arrays`.
        writer: see `load_arrays`.
        place: of the content, for the message.

    Raises:
        StateError: the content is truncated or of another writer.
    """
    views: Arrays = {}
    try:
        begin = 8 + int.from_bytes(memoryview(content)[:8], "little")
        header = json.loads(bytes(memoryview(content)[8:begin]))
        metadata = header.pop("__metadata__", {})
        check_mark(place, metadata, mark, writer)
        for key, entry in header.items():
            at, end = entry["data_offsets"]
            views[key] = np.ndarray(entry["shape"], _DTYPES[entry["dtype"]], content, begin + at)
            if end - at != views[key].nbytes:
                raise ValueError(f"{key} has {end - at} bytes")
        if len(memoryview(content)) != begin + sum(view.nbytes for view in views.values()):
            raise ValueError("its length is another one")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise StateError(f"{place} is truncated or not a file of states: {error}") from None
    return views, metadata


def check_mark(path: str | os.PathLike[str], found: Mapping[str, Any], mark: Mapping[str, str], writer: str) -> None:
    """Check that a file is of the writer, and of the version of its format that is read here.

    Args:
        path: of the file, for the message.
        found: its metadata.
        mark: see `write_arrays`; its key "version" is the version of the format.
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


@lru_cache(256)
def _layout(arrays: tuple[tuple[str, Any, tuple[int, ...]], ...]) -> tuple[list[tuple[str, Any]], str]:
    """Of arrays by name, type, shape: names and types in the order of a file; the header's JSON up to the metadata."""
    order, texts, end = [], "", 0
    # Larger items first, which aligns all of them, as safetensors' own writer does.
    for key, dtype, shape in sorted(arrays, key=lambda item: (-item[1].itemsize, item[0])):
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        name = type_of(key, dtype)
        entry = {"dtype": name, "shape": shape, "data_offsets": [begin, end]}
        texts += f"{json.dumps(key)}: {json.dumps(entry)}, "
        order.append((key, _DTYPES[name]))
    return order, texts


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
    """A regular expression of the names of `atomic_write`'s temporary files for those that match `name`."""
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
    """The error that a file or folder at `path` has met, with its place and the cure."""
    if not isinstance(error, OSError):
        return f"{path}: {error!r}"
    cure = _CURES.get(error.errno or 0, "check the disk")
    return f"{error.filename or path}: {error.strerror or error}; {cure}, or choose another folder"
