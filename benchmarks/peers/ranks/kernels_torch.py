"""The operations of distopt's codec kernels in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .kernels import Kernels


def prepare(setup: dict[str, Any]) -> tuple[str, Kernels]:
    """A description, and the kernels by task."""
    torch.set_num_threads(1)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(setup["count"], dtype=np.float32))
    magnitude, half, brain, wide = x.abs(), x.half(), x.bfloat16(), torch.zeros_like(x)
    k: int = setup["k"]
    kernels: Kernels = {
        "top-K": {"torch": lambda: torch.topk(magnitude, k, sorted=False)},
        "to float16": {
            "torch": x.half,
            "torch, scaled": lambda: x.half().div_(2),  # what DDP's fp16 hook does
            "torch, reused buffer": lambda: half.copy_(x),
        },
        "to bfloat16": {"torch": x.bfloat16, "torch, reused buffer": lambda: brain.copy_(x)},
        "from float16": {"torch": half.float, "torch, reused buffer": lambda: wide.copy_(half)},
    }
    return f"torch {torch.__version__}", kernels
