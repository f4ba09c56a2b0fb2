"""distopt's codec kernels, and the same operations in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from distopt import _core

from .kernels import Kernels


def prepare(setup: dict[str, Any]) -> tuple[str, Kernels]:
    """A description, and the kernels by task."""
    _core.set_isa(setup["isa"])
    x = np.random.default_rng(0).standard_normal(setup["count"], dtype=np.float32)
    k: int = setup["k"]
    room = _core.top_k_capacity(x.size, k)
    indices, values = np.zeros(room, np.int32), np.zeros(room, np.float32)
    residual, copy = np.zeros_like(x), np.zeros_like(x)
    chunks, blocks = (np.zeros(n, np.uint8) for n in (_core.chunks_bytes(x.size, 64, 2), _core.blocks_bytes(x.size, 4)))
    wire, half = np.zeros(x.size, np.uint16), np.zeros(x.size, np.float16)
    # The quantile above which a share of k / count lies, estimated from the start of the array.
    head = np.abs(x[: min(x.size, 100_000)])
    bound = float(np.quantile(head, 1 - k / x.size))
    # Negated, because NumPy partitions faster near the start of an array.
    negated = -np.abs(x)

    def corrected_top_k() -> None:
        # As in a training step: unless what was sent is removed, the residual grows from call to call.
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
        "64 of 4096 in 2 bits": {"distopt": lambda: _core.encode_chunks(x, chunks, 64, 2)},
        "64 of 4096 with error feedback": {"distopt": lambda: _core.encode_chunks(x, chunks, 64, 2, residual, copy)},
        "their sum over two ranks": {"distopt": lambda: _core.decode_chunks(np.stack([chunks, chunks]), copy, 64, 2)},
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
        "to 4 bits": {"distopt": lambda: _core.encode_blocks(x, blocks, 4)},
        "to 4 bits with error feedback": {"distopt": lambda: _core.encode_blocks(x, blocks, 4, residual, copy)},
        "from 4 bits": {"distopt": lambda: _core.decode_blocks(blocks, copy, 4)},
        "from float16": {
            "distopt": lambda: _core.decode16(wire, copy, "float16", 0.5),
            "NumPy": lambda: np.copyto(copy, half),
        },
    }
    return f"distopt ({setup['isa']}), NumPy {np.__version__}", kernels
