"""Random numbers of the stand-in: the generator has the methods and arguments that CuPy's has."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._array import device, ndarray


class Generator:
    """Other numbers than CuPy's, of the same distributions."""

    def __init__(self, seed: Any = None) -> None:
        self._numpy = np.random.default_rng(seed)

    def random(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> ndarray:
        return self._draw(self._numpy.random, size, dtype, out)

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> ndarray:
        return self._draw(self._numpy.standard_normal, size, dtype, out)

    def integers(
        self, low: Any, high: Any = None, size: Any = None, dtype: Any = np.int64, endpoint: bool = False
    ) -> ndarray:
        result: ndarray = device(np.asarray(self._numpy.integers(low, high, size, dtype, endpoint)))
        return result

    @staticmethod
    def _draw(method: Any, size: Any, dtype: Any, out: ndarray | None) -> ndarray:
        result: ndarray = device(np.asarray(method(size, np.dtype(dtype))))
        if out is None:
            return result
        out[...] = result
        return out


def default_rng(seed: Any = None) -> Generator:
    return Generator(seed)
