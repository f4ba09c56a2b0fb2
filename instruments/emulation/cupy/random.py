"""Random numbers of the stand-in: the generator has the methods and arguments of CuPy's that are used."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ._array import device


class BitGenerator:
    """Keeps its state in an array on the device, as CuPy's do: here that of NumPy's generator, as JSON."""

    def __init__(self, seed: Any = None) -> None:
        self._state = device(np.zeros(256, np.int8))
        self.save(np.random.default_rng(seed))

    def load(self) -> np.random.Generator:
        generator = np.random.default_rng()
        generator.bit_generator.state = json.loads(self._state.get().tobytes())
        return generator

    def save(self, generator: np.random.Generator) -> None:
        text = json.dumps(generator.bit_generator.state).encode().ljust(self._state.size)
        self._state.set(np.frombuffer(text, np.int8))


class Generator:
    """Other numbers than CuPy's, of the same distributions."""

    def __init__(self, bit_generator: BitGenerator) -> None:
        self.bit_generator = bit_generator

    def random(self, size: Any = None, dtype: Any = np.float64) -> Any:
        return self._draw("random", size, dtype)

    def standard_normal(self, size: Any = None, dtype: Any = np.float64) -> Any:
        return self._draw("standard_normal", size, dtype)

    def _draw(self, method: str, size: Any, dtype: Any) -> Any:
        generator = self.bit_generator.load()
        result = device(np.asarray(getattr(generator, method)(size, np.dtype(dtype))))
        self.bit_generator.save(generator)
        return result


def default_rng(seed: Any = None) -> Generator:
    return Generator(BitGenerator(seed))
