"""Counts what a training step launches on a GPU, and the bytes that it reads and writes, by name.

    python -m instruments.gpu.launches [NETWORK [BATCH]]

Kernels, products and CuPy's operations are counted and not computed, so that a large network takes seconds. Bytes are
those of the arrays of each launch, each array once, whether or not a cache holds them. Launches depend on the batch
only where the lowered images exceed `SCRATCH_BYTES`.
"""

from __future__ import annotations

import os
import struct
import sys
from collections import Counter
from functools import partial
from typing import Any

import numpy as np

from instruments.emulation import activate, build

build.build()
activate()
os.environ["DISTOPT_DEVICE"] = "cuda"

import cupy  # noqa: E402
from cupy import _array  # noqa: E402

from benchmarks import models  # noqa: E402
from distopt import opt  # noqa: E402
from distopt.kernels import cuda  # noqa: E402
from distopt.nn.numerics import gpu_base  # noqa: E402

launches: Counter[str] = Counter()
n_bytes: Counter[str] = Counter()


def note(name: str, *arguments: Any) -> None:
    launches[name] += 1
    found = {array.__array_interface__["data"][0]: array.nbytes for array in arrays_in(arguments)}
    n_bytes[name] += sum(found.values())


def arrays_in(value: Any) -> list[np.ndarray[Any, Any]]:
    """The arrays that an argument, or a function to be called later, holds."""
    if isinstance(value, cupy.ndarray):
        return [value._host]
    if isinstance(value, np.ndarray):
        return updated(value) if value.dtype.kind == "V" else [value]
    if isinstance(value, partial):
        return arrays_in([value.args, list(value.keywords.values())])
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in arrays_in(item)]
    return arrays_in([cell.cell_contents for cell in getattr(value, "__closure__", None) or ()])


def updated(fields: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """The arrays of an optimizer's update, twice what is written to."""
    layout = struct.Struct("384P96Q")
    if fields.nbytes != layout.size:
        return []
    *pointers, counts = np.array(layout.unpack(fields.tobytes()), np.int64).reshape(5, 96)
    sizes = np.concatenate([counts * (each != 0) for each in (*pointers, pointers[0], *pointers[2:])])
    return [np.empty(int(sizes.sum()), np.float32)]


def count() -> None:
    """Put counters in the place of whatever computes."""
    load, call = cuda.load, gpu_base._call

    def counted(name: str, device: int) -> Any:
        return lambda grid, block, arguments: note(name, *arguments), load(name, device)[1]

    def called(name: str, *arguments: Any) -> None:
        if "gemm" not in name:
            call(name, *arguments)
            return
        columns, rows, inner = arguments[2:5]
        pairs = arguments[-1] if "Batched" in name else 1
        launches[name] += 1
        n_bytes[name] += 4 * pairs * (columns * inner + inner * rows + rows * columns)

    cuda.load, gpu_base._call = counted, called
    _array.cuda.run = partial(note, "an operation of CuPy")
    _array.cuda.deferring = lambda: True  # so that every operation is run by `run`


def main(name: str = "resnet50", batch: str = "2") -> None:
    count()
    optimizer = opt.DistOpt(models.sgd(), non_finite="skip")  # nothing is computed, so gradients are NaN
    if name == "cnn":
        net, x, y = models.compiled(optimizer, int(batch))
    else:
        arrays = np.zeros((int(batch), 3, 224, 224), np.float32), np.zeros(int(batch), np.int32)
        net, x, y = models.compiled(optimizer, arrays, net=models.resnet(name))
    for _ in range(3):
        launches.clear()
        n_bytes.clear()
        net(x, y)
    for kind, times in launches.most_common():
        print(f"{times:5} {n_bytes[kind] / 1e6:10.1f} MB {kind}")
    print(f"{launches.total():5} {n_bytes.total() / 1e6:10.1f} MB in all")


if __name__ == "__main__":
    main(*sys.argv[1:])
