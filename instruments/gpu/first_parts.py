"""Parts of `first_gpu.py` other than tests, as small as they can be: python -m instruments.gpu.first_parts NAME."""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

ARCHITECTURES = (80, 90, 100, 120)
NOT_RUN = 77


def find_gpu() -> int:
    """Print the name of the GPU, or why none can be used."""
    from distopt.kernels.discovery import find_cupy

    cupy, missing = find_cupy()
    if cupy is None:
        print(missing)
        return NOT_RUN
    runtime, driver = cupy.cuda.runtime, Path("/proc/driver/nvidia/version")
    major, rest = divmod(runtime.driverGetVersion(), 1000)
    found = re.findall(r"\b\d{3}\.\d+(?:\.\d+)?\b", driver.read_text() if driver.exists() else "")
    name = runtime.getDeviceProperties(0)["name"].decode()
    print(f"{name}, driver {' '.join(found[:1])} for CUDA {major}.{rest // 10}")
    return 0


# -- without a GPU -----------------------------------------------------------------------------------------------------
def compile_kernels() -> int:
    """Compile every kernel for each architecture, and say how many registers it takes; spills are a failure."""
    try:
        from cupy.cuda import compiler

        from distopt.kernels import cuda
    except ImportError as error:
        print(f"CuPy cannot be imported ({error}); pip install cupy-cuda13x nvidia-cuda-nvrtc")
        return NOT_RUN
    sources = sorted({source for source, _ in cuda.kernels().values()})
    compiler._get_arch_for_options_for_nvrtc = lambda arch: (f"-arch=sm_{arch}", "cubin")  # CuPy's asks a driver
    jobs = [(source, number) for source in sources for number in ARCHITECTURES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        used = dict(zip(jobs, pool.map(lambda job: _usage(*job), jobs), strict=True))
    bad, heads = 0, " | ".join(f"sm_{number}" for number in ARCHITECTURES)
    print(f"| kernel | {heads} |\n| --- |{' --- |' * len(ARCHITECTURES)}")
    for source in sources:
        for name in cuda.program(source)["name_expressions"]:
            found = [used[source, number][name] for number in ARCHITECTURES]
            bad += sum(spilled > 0 for _, spilled in found)
            texts = (f"{registers}, spills {spilled}" if spilled else str(registers) for registers, spilled in found)
            print(f"| {name} | {' | '.join(texts)} |")
    print(f"registers of {sum(map(len, used.values()))} kernels; {bad} spill")
    return int(bad > 0)


def _usage(source: str, architecture: int) -> dict[str, tuple[int, int]]:
    """Registers, and bytes spilled, of each kernel of a source, compiled as `cupy.RawModule` does it."""
    from cupy.cuda import compiler

    from distopt.kernels import cuda

    code, options, names = cuda.program(source).values()
    given, log = (*options, "-ftz=true", "-Xptxas=-v"), StringIO()
    _, mangled = compiler.compile_using_nvrtc(code, given, architecture, source, names, log)
    found = {}
    for kernel in log.getvalue().split("Compiling entry function '")[1:]:
        registers = re.search(r"Used (\d+) registers", kernel)[1]
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", kernel).groups()
        found[kernel.partition("'")[0]] = int(registers), sum(map(int, spilled))
    return {name: found[symbol] for name, symbol in mangled.items()}


# -- on a GPU ----------------------------------------------------------------------------------------------------------
def probe() -> int:
    """The smallest use of a GPU, without a kernel of distopt: whether a tool lets it through."""
    import cupy

    return int(cupy.zeros(1).get()[0])


def every_kernel() -> int:
    """Each kernel once or twice, on odd sizes: short enough for compute-sanitizer."""
    import cupy

    from distopt.kernels import cuda

    noted, load = set(), cuda.load
    cuda.load = lambda name, device: noted.add(name) or load(name, device)
    for n in (1, 1023, 70_001):
        _codec_kernels(cupy, n)
        _element_kernels(cupy, n)
    _image_kernels(cupy)
    cupy.cuda.Device().synchronize()
    left_out = cuda.kernels().keys() - noted
    print(f"{len(noted)} kernels have run" + (f", not {', '.join(sorted(left_out))}" if left_out else ": every one"))
    return int(bool(left_out))


def _codec_kernels(cupy: Any, n: int) -> None:
    from distopt import _core
    from distopt.kernels import FINDINGS, Accumulation, gpu

    x, residual, momentum = (cupy.asarray(np.sin(np.arange(n) + i).astype(np.float32)) for i in range(3))
    wire, findings = cupy.empty(n, cupy.uint16), cupy.full(FINDINGS, -1, cupy.int64)
    for kind in ("float16", "bfloat16"):
        for kept in (None, residual):
            gpu.encode16(x, (kept, kept), wire, kind, 1.0, 1e4, findings)
        gpu.decode16(wire, x, kind, 1.0)
    for kept in (None, residual):
        blocks = cupy.empty(_core.blocks_bytes(n, 4), cupy.uint8)
        gpu.encode_blocks(x, (kept, kept), blocks, 4, 7, findings)
        gpu.decode_blocks(blocks, x, 4, 0.5, True)
        chunks = cupy.empty((2, _core.chunks_bytes(n, 64, 2)), cupy.uint8)
        for row in chunks:
            gpu.encode_chunks(x, (kept, kept), row, 64, 2, findings)
        gpu.decode_chunks(chunks, x, 64, 2, 0.5)
    k, lists = max(n // 100, 1), gpu.new_lists(n)
    for accumulation in (Accumulation(), Accumulation(residual, momentum, 0.7, 0.9)):
        gpu.top_k(x, k, accumulation, lists, findings)
        gpu.threshold(x, 0.5, accumulation, lists, findings)
        gpu.accumulate(x, accumulation, lists, findings)
    indices = cupy.arange(k, dtype=cupy.int32)
    gpu.scatter_sum(cupy.zeros(n, cupy.float32), [indices], [cupy.ones(k, cupy.float32)], 0, n)
    gpu.clear_at(x, indices)
    gpu.squared_norm(x)
    gpu.find_beyond(x, 0.5, findings[2:3])
    gpu.any_bad([findings[:3]])


def _element_kernels(cupy: Any, n: int) -> None:
    from distopt.nn.numerics import gpu

    x, slots = cupy.asarray(np.sin(np.arange(n)).astype("float32")), [cupy.ones(n, "float32") for _ in range(2)]
    gpu.update("sgd", [(x, cupy.ones_like(x), slots[:1])], 0.1, 0.9, 0.0, 0.0, False)
    gpu.update("adam", [(x, cupy.ones_like(x), slots)], 1, 0.1, 0.9, 0.999, 1e-8, 0.0)
    gpu.update("rmsprop", [(x, cupy.ones_like(x), slots[:1])], 0.1, 0.9, 1e-8, 0.0)
    gpu.update("adagrad", [(x, cupy.ones_like(x), slots[:1])], 0.1, 1e-8, 0.0)
    gpu.check_index(cupy.arange(n, dtype=cupy.int64), n, 0)


def _image_kernels(cupy: Any) -> None:
    from distopt.nn.numerics import gpu

    images = cupy.asarray(np.cos(np.arange(3 * 2 * 13 * 11)).astype("float32").reshape(3, 2, 13, 11))
    w, b = cupy.ones((5, 2, 3, 3), "float32"), cupy.ones(5, "float32")
    for pool in (None, ((2, 2), (2, 2), (0, 0))):
        y, saved = gpu.conv2d(images, w, b, relu=True, pool=pool)
        gpu.conv2d_backward(cupy.ones_like(y), saved, cupy.empty_like(w), cupy.empty_like(b))
    y, saved = gpu.avg_pool2d(images, (2, 2), (2, 2))
    gpu.avg_pool2d_backward(cupy.ones_like(y), saved)
    gamma, beta, mean, var = (cupy.ones(2, "float32") for _ in range(4))
    for options in ((True,), (False,), (True, True), (True, True, images)):
        y, saved = gpu.batch_norm2d(images, gamma, beta, mean, var, 0.1, 1e-5, *options)
        gpu.batch_norm2d_backward(y, saved, cupy.empty_like(gamma), cupy.empty_like(beta))
    rows, matrix = images.reshape(6, -1), cupy.ones((143, 10), "float32")
    logits, saved = gpu.linear(rows, matrix, cupy.ones(10, "float32"), relu=True)
    gpu.linear_backward(logits, saved, cupy.empty_like(matrix), cupy.empty(10, "float32"))
    for labels in (cupy.arange(6, dtype=cupy.int64), gpu.softmax(logits)):
        _, saved = gpu.softmax_cross_entropy(logits, labels)
        gpu.softmax_cross_entropy_backward(saved)


PARTS = {
    "gpu": find_gpu,
    "compile": compile_kernels,
    "probe": probe,
    "kernels": every_kernel,
}

if __name__ == "__main__":
    sys.exit(PARTS[sys.argv[1]]())
