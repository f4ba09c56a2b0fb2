"""`distopt diff`: the first step and the first array whose bits differ between two runs, and what else differs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.folder import MANIFEST, list_checkpoints, read_manifest, read_rank, read_shared, survey
from ..checkpoint.hashes import LOG, hash_of, read_log
from ..errors import UsageError

_NOTE = """\
A run is a folder of checkpoints, a checkpoint, or a log that DISTOPT_HASH has written, or its folder.
exit codes: 0: the same bits; 1: some differ; 2: there is nothing to compare
"""
_GENERATORS = "generators."  # global ones, which each rank seeds by itself


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "diff",
        help="tell where the bits of two runs begin to differ",
        description="Name the first step and the first array whose bits differ between two runs.",
        epilog=_NOTE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN")
    parser.set_defaults(run=_run)


class Run:
    """Logs and checkpoints of a run.

    Args:
        path: its folder, or a log.

    Attributes:
        hashes: by step, the hashes of all arrays, by name.
        checkpoints: folders of whole checkpoints, by step.
        settings: by name.

    Raises:
        UsageError: there is nothing to compare.
    """

    def __init__(self, path: Path) -> None:
        self.hashes: dict[int, dict[str, str]] = {}
        self.checkpoints: dict[int, Path] = {}
        self.settings: dict[str, str] = {}
        folders = [path] if (path / MANIFEST).exists() else list_checkpoints(path) if path.is_dir() else []
        for folder in [folder for folder in folders if survey(folder).whole]:
            manifest = read_manifest(folder)
            self.checkpoints[manifest.step] = folder
            self.settings = manifest.versions
        if (log := path / LOG if path.is_dir() else path).exists():
            saved = self.settings
            self.hashes, self.settings = read_log(log)
            if self._has_log_of_another_run():
                print(f"{log} is of another run than the checkpoints beside it, and is left out")
                self.hashes, self.settings = {}, saved
        if not self.hashes and not self.checkpoints:
            raise UsageError(f"{path} has neither whole checkpoints nor {LOG}; set DISTOPT_HASH in both runs")

    def _has_log_of_another_run(self) -> bool:
        """Whether a checkpoint holds other arrays than the log says for its step."""
        for step in self.checkpoints.keys() & self.hashes.keys():
            logged, saved = self.hashes[step], self.arrays(step)
            if any(name in logged and logged[name] != hash_of(array) for name, array in saved.items()):
                return True
        return False

    def arrays(self, step: int) -> dict[str, Any]:
        """The arrays of a checkpoint; of those that each rank has, rank 0's."""
        folder, order = self.checkpoints[step], list(next(iter(self.hashes.values()), ()))
        manifest = read_manifest(folder)
        found = read_rank(folder, manifest, 0)[0]
        for rank in range(manifest.world_size):
            found |= read_shared(folder, manifest, rank)
        names = [name for name in found if not name.startswith(_GENERATORS)]
        return {name: found[name] for name in sorted(names, key=[*order, *sorted(found)].index)}


def how_much(one: Any, other: Any) -> str:
    """By how much two arrays differ, or two hashes; nothing if their bits are equal.

    A unit in the last place (ulp) is a step from one floating-point number to the next.
    """
    if one is None or other is None:
        return "is in one run only"
    if isinstance(one, str):
        return "" if one == other else "differs"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"is {one.dtype} of shape {one.shape}, and {other.dtype} of shape {other.shape}"
    bits = [np.atleast_1d(array).view(f"u{array.itemsize}") for array in (one, other)]
    if not (n_differ := np.count_nonzero(bits[0] != bits[1])):
        return ""
    if (n_nan := np.count_nonzero(np.isnan(one) != np.isnan(other))) > 0:
        return f"differs in {n_differ} of {one.size} elements, {n_nan} of them NaN in one run only"
    with np.errstate(invalid="ignore"):
        most = np.nanmax(np.abs(one.astype(np.longdouble) - other), initial=0)
    text = f"differs in {n_differ} of {one.size} elements, by at most {most:.3g}"
    if one.dtype.kind == "f":
        top = bits[0].dtype.type(1 << 8 * one.itemsize - 1)
        places = [np.where(each & top, ~each, each | top) for each in bits]  # in the order of the numbers
        text += f" ({np.max(np.maximum(*places) - np.minimum(*places))} ulp)"
    return text


def _first(
    steps: Iterable[int], one: Callable[[int], Mapping[str, Any]], other: Callable[[int], Mapping[str, Any]]
) -> tuple[int, str]:
    """The first step with arrays that differ, and the first of these; -1 and nothing without one."""
    for step in steps:
        mine, theirs = one(step), other(step)
        names = {**mine, **theirs}
        texts = {name: text for name in names if (text := how_much(mine.get(name), theirs.get(name)))}
        if texts:
            name = next(iter(texts))
            return step, f"{name} {texts[name]}; {len(texts)} of {len(names)} arrays differ"
    return -1, ""


def _run(args: argparse.Namespace) -> int:
    one, other = map(Run, args.runs)
    logged, saved = sorted(one.hashes.keys() & other.hashes), sorted(one.checkpoints.keys() & other.checkpoints)
    if not logged and not saved:
        raise UsageError("the runs have no step in common, neither in logs nor in checkpoints")
    step, text = _first(logged, one.hashes.__getitem__, other.hashes.__getitem__)
    at, amount = _first([each for each in saved if each >= step], one.arrays, other.arrays)
    if text:
        print(f"step {step}: {text}")
    elif logged:
        print(f"steps in both logs: {len(logged)}, from {logged[0]} to {logged[-1]}, with the same bits")
    if amount:
        print(f"checkpoint of step {at}: {amount}")
    elif text:
        print(f"no checkpoint of both from step {step} on differs: save one to see by how much")
    elif saved:
        print(f"checkpoints of both runs: {len(saved)}, with the same bits")
    for name in {**one.settings, **other.settings}:
        mine, theirs = (run.settings.get(name, "unknown") for run in (one, other))
        if mine != theirs:
            print(f"{name}: {mine} | {theirs}")
    return int(bool(text or amount))
