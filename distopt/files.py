"""Files that survive a crash: a reader finds the old content or the new, never a part of either."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["atomic_write", "file_lock"]


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Local. Replace the file `path` by what the body writes, all of it or nothing.

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
    # The rename itself lasts only once the folder is on the disk.
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def file_lock(path: str | os.PathLike[str]) -> Iterator[None]:
    """Local. Hold the lock file `path` during the body; other processes and threads that want it wait.

    The kernel releases the lock when its holder dies. The empty lock file stays: to remove it would let a process
    that waits on the removed file and one that creates it anew both believe to be alone.

    Raises:
        OSError: the file cannot be created or its file system has no locks.
    """
    with Path(path).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open_temporary(target: Path) -> tuple[Path, BinaryIO]:
    """A new temporary file, marked as in use by a lock where the file system has locks."""
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        file = temporary.open("x+b")
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()  # another writer took it for an orphan before it was locked


def _remove_orphans(target: Path) -> None:
    """Remove the temporary files of writers to `target` that no longer run."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.tmp")
    for entry in target.parent.iterdir():
        if not pattern.fullmatch(entry.name):
            continue
        # Locked, finished meanwhile, or on a file system without locks: none of them is this writer's business.
        with contextlib.suppress(OSError), entry.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            entry.unlink()
