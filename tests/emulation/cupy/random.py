"""Random numbers of the stand-in: the generator has the methods and arguments of CuPy's that are used."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._array import device


class Generator:
    """Other numbers than CuPy's, of the same distributions."""

    def __init__(self, seed: Any) -> None:
        self._generator = np.random.default_rng(seed)

    def random(self, size: Any = None, dtype: Any = np.float64) -> Any:
        return device(np.asarray(self._generator.random(size, dtype)))

    def standard_normal(self, size: Any = None, dtype: Any = np.float64) -> Any:
        return device(np.asarray(self._generator.standard_normal(size, dtype)))


def default_rng(seed: Any = None) -> Generator:
    return Generator(seed)
