"""The instruction sets of processors give the same bits, whatever the length of their vectors.

All sets with fused multiply-add agree. The portable one rounds each product, so its convolutions and linear layers
differ in the last bits; its sums have the same order all the same.
"""

import hashlib
import platform
from pathlib import Path

import numpy as np
import pytest

from distopt import _core, autograd, layer, opt
from distopt.nn.core.tensor import Tensor
from distopt.nn.numerics import cpu
from tests.unit.nets import Chain

ISAS = _core.supported_isas()
FUSED = [isa for isa in ISAS if isa != "portable"]
# Linux's names of the instructions that a set uses, listed only if the system saves their registers.
FLAGS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
}


def test_a_build_has_every_set_that_the_processor_has():
    if platform.machine() != "x86_64":
        assert (["portable", "neon"] if platform.machine() == "aarch64" else ["portable"]) == ISAS
        return
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = {*next(line for line in lines if line.startswith("flags")).partition(":")[2].split()}
    assert ["portable", *(isa for isa, needed in FLAGS.items() if needed <= flags)] == ISAS


def numbers(*shape, dtype=np.float32, step=37):
    """Values whose sums are rounded, exactly the same everywhere: no generator, no library."""
    return ((np.arange(np.prod(shape)) * step % 1009 - 504) / 511).reshape(shape).astype(dtype)


def partial_sums(images, lanes, tail_apart):
    """The sum of each row of images [n, rows, pixels] in `lanes` partial sums, over all images or (direct) by image."""
    _, rows, pixels = images.shape
    total, partial = np.zeros(rows, images.dtype), np.zeros((rows, lanes), images.dtype)
    for image in images:
        whole = pixels - pixels % lanes if tail_apart else pixels
        for first in range(0, whole, lanes):
            block = image[:, first : min(first + lanes, whole)]
            partial[:, : block.shape[1]] += block
        if tail_apart:
            of_image = np.zeros(rows, images.dtype)
            for column in (*image.T[whole:], *partial.T):
                of_image += column
            total += of_image
            partial[:] = 0
    for column in partial.T:
        total += column
    return total


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [3, 7, 8, 13, 19])
def test_the_gradient_of_a_bias_has_as_many_partial_sums_on_every_set(dtype, size):
    lanes = 64 // np.dtype(dtype).itemsize
    x, w, b = numbers(3, 5, size, size, dtype=dtype), numbers(6, 5, 2, 2, dtype=dtype), numbers(6, dtype=dtype)
    y, saved = cpu.conv2d(x, w, b, (1, 1), (0, 0), False)
    dy, db = numbers(*y.shape, dtype=dtype, step=61), np.empty_like(b)
    cpu.conv2d_backward(dy, saved, np.empty_like(w), db, False)
    np.testing.assert_array_equal(db, partial_sums(dy.reshape(3, 6, -1), lanes, False))
    y, saved = cpu.conv2d(x[:, :2].copy(), w[:, :2].copy(), b, (1, 1), (0, 0), False, ((2, 2), (2, 2), (0, 0)))
    dy = numbers(*y.shape, dtype=dtype, step=61)
    cpu.conv2d_backward(dy, saved, np.empty_like(w[:, :2]), db, False)
    np.testing.assert_array_equal(db, partial_sums(dy.reshape(3, 6, -1), lanes, True))


def trained():
    """All parameters after some steps. Nothing of it is computed by NumPy but single elements.

    A convolution of each algorithm, with shapes in which the lengths of vectors would show.
    """
    net = Chain(
        autograd.mse_loss,
        direct=layer.Conv2d(8, 5, padding=2, activation="RELU"),
        pool=layer.MaxPool2d(2, 2),
        small=layer.Conv2d(24, 3, padding=1),
        large=layer.Conv2d(9, 5, padding=2, activation="RELU"),
        lowered=layer.Conv2d(11, 3, stride=2),
        flatten=layer.Flatten(),
        linear=layer.Linear(5),
    )
    net.set_optimizer(opt.SGD(lr=0.05, momentum=0.9))
    x, target = Tensor.of(numbers(40, 3, 24, 24)), Tensor.of(numbers(40, 5, step=5))
    net.compile([x], is_train=True)
    for i, param in enumerate(net.get_params().values()):
        param.copy_from_numpy(numbers(*param.shape, step=11 + 2 * i) / 16)
    for _ in range(4):
        net(x, target)
    return {name: param.to_numpy() for name, param in net.get_params().items()}


def test_whole_runs_give_the_same_bits():
    runs, before = {}, _core.isa()
    for isa in ISAS:
        _core.set_isa(isa)
        runs[isa] = trained()
    _core.set_isa(before)
    for isa in FUSED:
        for name, param in runs[isa].items():
            np.testing.assert_array_equal(param, runs[FUSED[0]][name], err_msg=f"{name} on {isa}")
            np.testing.assert_allclose(param, runs["portable"][name], rtol=1e-3, atol=1e-4)
    for isa in FUSED:  # the bits of AVX-512, which other machines have, and NEON
        digest = hashlib.sha256(b"".join(runs[isa][name].tobytes() for name in sorted(runs[isa])))
        assert digest.hexdigest()[:16] == "ff8b81db7bb19c19"
