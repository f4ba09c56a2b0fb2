"""Convolutions as sums over the taps of the filter, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# The operands and, last, the result of each operation, as letters of y = conv(x, w).
ROLES = {"fprop": "xwy", "dgrad": "ywx", "wgrad": "xyw"}


def down_converted(array: Array, name: str) -> Array:
    """With the 10 bits of fraction that float16 and TF32 have."""
    if name == "half":
        return array.astype(np.float16).astype(array.dtype)
    return (np.ascontiguousarray(array).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


class Convolution:
    """An operation on arrays of fixed shapes."""

    def __init__(self, kind: str, *dims: list[int], padding: list[int], stride: list[int], dilation: list[int]) -> None:
        shapes = dict(zip(ROLES[kind], dims, strict=True))
        (n, c, *size), (m, channels, *kernel) = shapes["x"], shapes["w"]
        places = [(s + 2 * p - k) // step + 1 for s, p, k, step in zip(size, padding, kernel, stride, strict=True)]
        if channels != c or shapes["y"] != [n, m, *places]:
            raise RuntimeError(f"shapes that do not fit: {shapes} with padding {padding} and stride {stride}")
        self.taps = kernel[0] * kernel[1]
        self._kind, self._shapes, self._places = kind, shapes, places
        self._padding, self._stride = padding, stride

    def __call__(self, first: Array, second: Array) -> Array:
        arrays = {role: np.zeros(shape) for role, shape in self._shapes.items()}
        arrays |= zip(ROLES[self._kind], (first, second), strict=False)
        (ph, pw), (sh, sw), (oh, ow) = self._padding, self._stride, self._places
        x, w, y = (arrays[role] for role in "xwy")
        padded = np.pad(x.astype(float), ((0, 0), (0, 0), (ph, ph), (pw, pw)))
        for i, j in np.ndindex(*w.shape[2:]):
            met = padded[:, :, i : i + sh * (oh - 1) + 1 : sh, j : j + sw * (ow - 1) + 1 : sw]
            if self._kind == "fprop":
                y += np.einsum("nchw,mc->nmhw", met, w[:, :, i, j])
            elif self._kind == "dgrad":
                met += np.einsum("nmhw,mc->nchw", y, w[:, :, i, j])
            else:
                w[:, :, i, j] = np.einsum("nchw,nmhw->mc", met, y)
        return {"fprop": y, "dgrad": padded[:, :, ph : ph + x.shape[2], pw : pw + x.shape[3]], "wgrad": w}[self._kind]
