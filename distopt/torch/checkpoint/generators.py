"""Random generators of PyTorch, and the global ones of each library.

Each is a part of its own: where the number of ranks changes, those that all ranks have seeded equally stay equal.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from ...checkpoint.adapters import Adapter, LegacyRandom, PythonRandom, State
from ...errors import StateError
from .trees import tensor_from


class TorchGenerator(Adapter):
    """A random generator of PyTorch."""

    random = True

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._loaded: State | None = None

    def snapshot(self) -> State:
        """Local. The generator's state, uint8 [n], and the type of its device."""
        return State({"": self._generator.get_state().numpy()}, {"device": self._generator.device.type})

    def check(self, state: State) -> None:
        """Local. Check that the state is of a generator on the same type of device."""
        own = self.snapshot()
        if state.notes != own.notes or state.arrays.get("", np.empty(0)).shape != own.arrays[""].shape:
            raise StateError(f"the generator is one of {own.notes['device']}, the states are of another kind")

    def put(self, state: State) -> None:
        """Local. Set the generator's state."""
        self._loaded = state
        self._generator.set_state(tensor_from(state.arrays[""], torch.uint8))

    def put_again(self) -> None:
        """Local. Set the state of the last `put` again."""
        if self._loaded is not None:
            self.put(self._loaded)


class CudaGenerator(Adapter):
    """The global generator of the current GPU; without states where CUDA is not in use."""

    random = True

    def snapshot(self) -> State:
        """Local. The generator's state, uint8 [n]."""
        return State({"": torch.cuda.get_rng_state().numpy()} if torch.cuda.is_initialized() else {}, {})

    def check(self, state: State) -> None:
        """Local. Nothing; a job may resume on another device."""

    def put(self, state: State) -> None:
        """Local. Set the generator's state, if there is one, and a GPU."""
        if "" in state.arrays and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensor_from(state.arrays[""], torch.uint8))


def global_generators() -> dict[str, Adapter]:
    """Local. An adapter for each global generator of PyTorch, Python and NumPy, by names that no object has."""
    return {
        "generators.torch": TorchGenerator(torch.default_generator),
        "generators.cuda": CudaGenerator(),
        "generators.python": PythonRandom(random),
        "generators.numpy": LegacyRandom(np.random),
    }
