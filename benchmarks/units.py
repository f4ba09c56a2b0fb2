"""Command-line types, messages and files that several benchmarks share."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentTypeError
from typing import TYPE_CHECKING

from ...files import atomic_write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = [
    "announce",
    "byte_size",
    "byte_sizes",
    "names_of",
    "size_range",
    "whole_sizes",
    "write_json",
]

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGkmg]?)")
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def byte_size(text: str) -> int:
    """Bytes of "64", "1K", "1.5M" or "2G"; the suffixes are powers of 1,024, as in nccl-tests."""
    match = _SIZE.fullmatch(text)
    size = float(match[1]) * _FACTORS[match[2].upper()] if match else 0.0
    if size < 1 or size != int(size):
        raise ArgumentTypeError(f"{text!r} is not a size in bytes; write it like 4096, 64K, 128M or 1G")
    return int(size)


def byte_sizes(text: str) -> list[int]:
    """The sizes of "4K,64K,1M"; see `byte_size`."""
    return [byte_size(word) for word in text.split(",")]


def whole_sizes(sizes: Iterable[int], item_bytes: int) -> list[int]:
    """`sizes` (bytes) rounded down to whole items, each once, in ascending order; without those of no item."""
    return sorted({size // item_bytes * item_bytes for size in sizes} - {0})


def size_range(first: int, last: int, factor: float, item_bytes: int) -> list[int]:
    """Sizes from `first` to `last` (bytes), each `factor` times the previous one, rounded down to whole items."""
    sizes: list[int] = []
    size = float(first)
    while size <= last:
        whole = int(size) // item_bytes * item_bytes
        if whole > (sizes[-1] if sizes else 0):
            sizes.append(whole)
        size *= factor
    return sizes


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names, each one of `known`."""
    choices = list(known)

    def read(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in choices:
                raise ArgumentTypeError(f"{name!r} is not one of {', '.join(choices)}")
        return list(dict.fromkeys(names))

    return read


def announce(text: str) -> None:
    """Report something that takes long, on stderr."""
    print(f"# {text}", file=sys.stderr, flush=True)


def write_json(path: Path, report: object) -> None:
    """Write what `--json` asked for."""
    with atomic_write(path) as file:
        file.write(json.dumps(report, indent=1).encode())
