"""distopt's codec kernels, and NumPy's way to the same results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from distopt import _core

if TYPE_CHECKING:
    from .kernels import Kernels

__all__ = ["prepare"]


def prepare(setup: dict[str, Any]) -> tuple[str, Kernels]:
    """What it is, and the kernels by task."""
    _core.set_isa(setup["isa"])
    x = np.random.default_rng(0).standard_normal(setup["count"], dtype=np.float32)
    k: int = setup["k"]
    room = _core.top_k_capacity(x.size, k)
    indices, values = np.zeros(room, np.int32), np.zeros(room, np.float32)
    residual, copy = np.zeros_like(x), np.zeros_like(x)
    wire, half = np.zeros(x.size, np.uint16), np.zeros(x.size, np.float16)
    # The share k / count of a standard normal lies above it, as estimated from the beginning.
    head = np.abs(x[: min(x.size, 100_000)])
    bound = float(np.quantile(head, 1 - k / x.size))
    # Negated, because partitioning near the beginning is the faster side of NumPy.
    negated = -np.abs(x)

    def corrected_top_k() -> None:
        # As a step does it: without taking out what was sent, the residual would grow from call to call.
        _core.top_k(x, k, indices, values, residual)
        _core.clear_at(residual, indices[:k])

    kernels: Kernels = {
        "read": {"distopt": lambda: _core.squared_norm(x)},
        "read and write": {"NumPy": lambda: np.copyto(copy, x)},
        "top-K": {
            "distopt": lambda: _core.top_k(x, k, indices, values),
            "NumPy argpartition": lambda: np.argpartition(negated, k - 1),
        },
        "top-K with error feedback": {"distopt": corrected_top_k},
        "threshold": {
            "distopt": lambda: _core.threshold(x, bound, indices, values),
            "NumPy": lambda: x[np.flatnonzero(np.abs(x) >= bound)],
        },
        "to float16": {
            "distopt": lambda: _core.encode16(x, wire, "float16", 0.5, 32752.0),
            "NumPy": lambda: np.copyto(half, x, casting="same_kind"),
        },
        "to float16 with error feedback": {
            "distopt": lambda: _core.encode16(x, wire, "float16", 0.5, 32752.0, residual)
        },
        "to bfloat16": {"distopt": lambda: _core.encode16(x, wire, "bfloat16", 0.5, 1e38)},
        "from float16": {
            "distopt": lambda: _core.decode16(wire, copy, "float16", 0.5),
            "NumPy": lambda: np.copyto(copy, half),
        },
    }
    return f"distopt ({setup['isa']}), NumPy {np.__version__}", kernels
