"""`DISTOPT_HASH`: a log of hashes of all states after every step, by which `distopt diff` compares two runs.

A line of the log is an object in JSON. The keys "names" and "settings" apply to the lines below, whose keys are "step",
"epoch" and "arrays", the hash of each of "names". Of several lines for one step, which was done again after a
fault, the last one counts.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import ThreadpoolController

from .. import _core
from ..errors import CheckpointError, StateError, UsageError
from ..files import atomic_write, described
from ..kernels import array_module
from ..kernels.digest import digests
from .adapters import exchanged, snapshot_of

if TYPE_CHECKING:
    from .adapters import Adapter, Ranks

LOG = "hashes.jsonl"


def settings_of(ranks: Ranks) -> dict[str, str]:
    """Collective. All that bits may depend on besides the script; where ranks differ, the values of all of them."""
    from .. import __version__

    own = {"distopt": __version__, "numpy": np.__version__, "python": platform.python_version()}
    own["instruction set"] = _core.isa()
    if (torch := sys.modules.get("torch")) is not None:
        own |= {"torch": torch.__version__, "torch's instruction set": torch.backends.cpu.get_cpu_capability()}
    own |= {f"threads of {each['internal_api']}": str(each["num_threads"]) for each in ThreadpoolController().info()}
    gathered = exchanged(ranks, own)
    hosts = ranks.topology.hosts
    found = {"ranks of each host": ", ".join(str(hosts.count(host)) for host in dict.fromkeys(hosts))}
    for key in dict.fromkeys(key for each in gathered for key in each):
        found[key] = ", ".join(sorted({each.get(key, "none") for each in gathered}))
    return found


def hash_of(array: Any) -> str:
    """The hash of an array's bits in a log."""
    return f"{digests([array_module(array).ascontiguousarray(array)])[0]:016x}"


class HashLog:
    """The log of this run, which rank 0 writes.

    Args:
        where: "every", for a file beside checkpoints, or a folder.
        root: folder of the checkpoints, or None.
        ranks: all ranks.
        settings: of the run.
        resumes: whether the run resumes, and adds to its log.

    Raises:
        UsageError: the file is to be beside checkpoints, and these have no folder.
        CheckpointError: the log cannot be written, here and in `add`.
    """

    def __init__(self, where: str, root: Path | None, ranks: Ranks, settings: Mapping[str, str], resumes: bool) -> None:
        folder = root if where == "every" else Path(where)
        if folder is None:
            raise UsageError("DISTOPT_HASH=every is for a Checkpoint with a folder; set DISTOPT_HASH to a folder")
        self._settings = settings
        self._names: list[str] = []
        self._file = None
        if ranks.topology.rank == 0:
            with self._writing(folder / LOG):
                folder.mkdir(parents=True, exist_ok=True)
                self._file = (folder / LOG).open("ab" if resumes else "wb", buffering=0)

    def add(self, step: int, epoch: int, adapters: Mapping[str, Adapter]) -> None:
        """Local, on all ranks. Add the hashes of the states after a step, but for random generators of ranks."""
        states = snapshot_of({name: each for name, each in adapters.items() if not each.random})
        if self._file is None:
            return
        arrays = {**states.shared, **states.own}
        hashes = [hash_of(array) for array in arrays.values()]
        with self._writing(Path(self._file.name)):
            if list(arrays) != self._names:
                self._names = list(arrays)
                self._file.write(b"\n")  # the last line may be cut
                self._add_line({"names": self._names, "settings": self._settings})
            self._add_line({"step": step, "epoch": epoch, "arrays": hashes})

    def _add_line(self, content: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(content).encode() + b"\n")

    @contextmanager
    def _writing(self, log: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            raise CheckpointError(f"the hashes of DISTOPT_HASH cannot be written: {described(error, log)}") from None

    def close(self) -> None:
        """Close the file, and add no more; idempotent."""
        if self._file is not None:
            self._file.close()
        self._file = None


def cut_log(path: Path, step: int) -> None:
    """Remove the hashes of steps after `step`, which a run without DISTOPT_HASH does anew; of all, the file.

    Raises:
        OSError: from the file system.
    """
    if not path.exists():
        return
    if step == 0:
        path.unlink()
        return
    kept = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError, TypeError, AttributeError):  # it is cut, or empty
            if json.loads(line).get("step", 0) <= step:
                kept.append(line)
    with atomic_write(path) as file:
        file.write(b"\n".join(kept) + b"\n")


def read_log(path: Path) -> tuple[dict[int, dict[str, str]], dict[str, str]]:
    """The hashes of arrays in a log, by step and name, and the settings of the last part of the run.

    Raises:
        StateError: the file is no such log.
    """
    names: list[str] = []
    settings: dict[str, str] = {}
    hashes = {}
    for line in path.read_text(errors="replace").splitlines():
        try:
            content: dict[str, Any] = json.loads(line)
        except ValueError:  # empty, or cut by the end of the process
            continue
        try:
            if "names" in content:
                names, settings = content["names"], content["settings"]
            else:
                hashes[int(content["step"])] = dict(zip(names, content["arrays"], strict=True))
        except (LookupError, TypeError, ValueError):
            raise StateError(f"{path} is no log of DISTOPT_HASH; remove it, or give another folder") from None
    return hashes, settings
