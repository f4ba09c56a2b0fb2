"""Convolutions as sums over the taps of the filter, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def down_converted(array: Array, name: str) -> Array:
    """With the 10 bits of fraction that float16 and TF32 have; tensor cores take float64 as it is."""
    if name == "half":
        return array.astype(np.float16).astype(array.dtype)
    if array.dtype == np.float64:
        return array
    return (np.ascontiguousarray(array).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


class _Convolution:
    """Knows the shapes of x, w and y, and what each tap of the filter meets."""

    def __init__(
        self, x: list[int], w: list[int], y: list[int], padding: list[int], stride: list[int], dilation: list[int]
    ) -> None:
        (n, c, *size), (m, channels, *kernel) = x, w
        expected = [(s + 2 * p - k) // step + 1 for s, p, k, step in zip(size, padding, kernel, stride, strict=True)]
        if channels != c or y != [n, m, *expected]:
            raise RuntimeError(f"shapes that do not fit: {x}, {w}, {y} with padding {padding} and stride {stride}")
        self.x, self.w, self.y = x, w, y
        self.taps = kernel[0] * kernel[1]
        self._padding, self._stride, self._kernel = padding, stride, kernel

    def padded(self) -> Array:
        (n, c, h, w), (ph, pw) = self.x, self._padding
        return np.zeros((n, c, h + 2 * ph, w + 2 * pw))

    def inside(self, padded: Array) -> Array:
        (_, _, h, w), (ph, pw) = self.x, self._padding
        return padded[:, :, ph : ph + h, pw : pw + w]

    def windows(self, padded: Array) -> Any:
        """Row and column of each tap, with a view of what it meets at each place: [N, C, oh, ow]."""
        (sh, sw), (oh, ow) = self._stride, self.y[2:]
        for i in range(self._kernel[0]):
            for j in range(self._kernel[1]):
                yield i, j, padded[:, :, i : i + sh * (oh - 1) + 1 : sh, j : j + sw * (ow - 1) + 1 : sw]


class Fprop(_Convolution):
    def __call__(self, x: Array, w: Array) -> Array:
        padded, y = self.padded(), np.zeros(self.y)
        self.inside(padded)[...] = x
        for i, j, met in self.windows(padded):
            y += np.einsum("nchw,mc->nmhw", met, w[:, :, i, j])
        return y


class Dgrad(_Convolution):
    def __init__(self, dy: list[int], w: list[int], dx: list[int], **options: Any) -> None:
        super().__init__(dx, w, dy, **options)

    def __call__(self, dy: Array, w: Array) -> Array:
        padded = self.padded()
        for i, j, met in self.windows(padded):
            met += np.einsum("nmhw,mc->nchw", dy, w[:, :, i, j])
        return self.inside(padded)


class Wgrad(_Convolution):
    def __init__(self, x: list[int], dy: list[int], dw: list[int], **options: Any) -> None:
        super().__init__(x, dw, dy, **options)

    def __call__(self, x: Array, dy: Array) -> Array:
        padded, dw = self.padded(), np.zeros(self.w)
        self.inside(padded)[...] = x
        for i, j, met in self.windows(padded):
            dw[:, :, i, j] = np.einsum("nmhw,nchw->mc", dy, met)
        return dw


OPERATIONS = {"fprop": Fprop, "dgrad": Dgrad, "wgrad": Wgrad}
