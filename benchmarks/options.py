"""Sizes and names on command lines, as types of argparse."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:([KMGkmg])(?:iB)?)?")
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def byte_size(text: str) -> int:
    """Bytes of "64", "1K", "1.5MiB" or "2G"; the suffixes are powers of 1,024, as in nccl-tests."""
    match = _SIZE.fullmatch(text)
    size = float(match[1]) * _FACTORS[(match[2] or "").upper()] if match else 0.0
    if size < 1 or size != int(size):
        raise ArgumentTypeError(f"{text!r} is not a size in bytes; write it like 4096, 64K, 128M or 1G")
    return int(size)


def byte_sizes(text: str) -> list[int]:
    """The sizes of "4K,64K,1M"; see `byte_size`."""
    return [byte_size(word) for word in text.split(",")]


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
