"""The kernels as they are declared, compiled, kept and launched."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest

from distopt.errors import MissingDependencyError, UsageError
from tests.gpu import require_gpu

require_gpu()

import cupy  # noqa: E402

from distopt.kernels import cuda, gpu, host  # noqa: E402
from distopt.nn.kernels import gpu as nn_gpu  # noqa: E402
from distopt.nn.kernels import gpu_base  # noqa: E402


def negatives(n: int = 4):
    return cupy.arange(-n, 0, dtype=cupy.float32), cupy.empty(n, cupy.float32)


def test_every_kernel_of_every_source_is_known():
    for path in cuda._FOLDER.glob("*.cu"):
        declared = re.findall(r"__global__", path.read_text())
        assert len(declared) == sum(kernel.source == path.name for kernel in cuda.kernels().values()), path.name
    assert cuda.kernels()["encode"].template == ("Type", "with_residual", "unit")
    assert cuda.kernels()["find_beyond"].parameters == ("*", "size_t", "T", "*", "bool")
    assert len(cuda.instances("codec.cu")) == 2 * 2 * 2 + 2 + 2 + 2
    assert "relu_backward" in cuda.instances("elementwise.cu")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (lambda x, y: (x, y, x.size), ValueError),  # one is missing
        (lambda x, y: (x, y, x.size, True, 1), ValueError),
        (lambda x, y: (x, 0.5, x.size, True), TypeError),
        (lambda x, y: (x, y.get(), x.size, True), TypeError),
        (lambda x, y: (x, y, -1, True), OverflowError),
    ],
)
@pytest.mark.filterwarnings("error")
def test_arguments_that_do_not_fit_are_refused(arguments, error):
    x, y = negatives()
    with pytest.raises(error):
        cuda.launch("relu_backward", (1,), (32,), x, *arguments(x, y))
    with pytest.raises(KeyError):
        cuda.launch("relu_backward<half>", (1,), (32,), x, x, y, x.size, True)


def test_arrays_of_another_gpu_are_refused():
    """As in a thread that a script has made, where GPU 0 is the current one."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(1):
        x, _ = negatives()
        square = x.reshape(2, 2)
        on_own = gpu_base.product(square, square)
    for use in (lambda: nn_gpu.relu(x), lambda: gpu_base.product(square, square, on_own)):
        with pytest.raises(UsageError, match=r"on GPU 1, but this thread computes on GPU 0; call .*Device\(1\)\.use"):
            use()


def test_subnormal_numbers_stay():
    tiny = np.float32(2.0**-140) * np.arange(1, 9, dtype=np.float32)
    indices = np.arange(8, dtype=np.int32)
    ours, theirs = cupy.zeros(8, cupy.float32), np.zeros(8, np.float32)
    gpu.scatter_sum(ours, [cupy.asarray(indices)], [cupy.asarray(tiny)], 0, 8, 0.5)
    host.scatter_sum(theirs, [indices], [tiny], 0, 8, 0.5)
    assert theirs.all()
    np.testing.assert_array_equal(ours.get().view(np.int32), theirs.view(np.int32))


def test_an_error_of_the_compiler_names_the_line_the_versions_and_the_cure(monkeypatch, tmp_path):
    (tmp_path / "wrong.cuh").write_text("#pragma once\nconstexpr int one = 1;\n")
    (tmp_path / "wrong.cu").write_text('#include "wrong.cuh"\n\n__global__ void wrong(int* x) { *x = one + two; }\n')
    monkeypatch.setattr(cuda, "_FOLDER", tmp_path)
    with pytest.raises(MissingDependencyError) as caught:
        cuda.compiled("wrong.cu", ["wrong"], "sm_90")
    text = str(caught.value)
    assert re.search(r"wrong\.cu[(:]3\b", text), text
    assert "two" in text
    assert f"NVRTC of CUDA {'.'.join(map(str, cupy.cuda.nvrtc.getVersion()))} with CuPy {cupy.__version__}" in text
    assert "pip install" in text


@pytest.fixture
def loaded_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda, "_functions", {})
    return tmp_path / "cache"


def rectified() -> bool:
    x, y = negatives()
    cuda.launch("relu_backward", (1,), (32,), x, x, y, x.size, True)
    return not y.get().any()


def test_a_kernel_is_compiled_once_for_all_processes(monkeypatch, loaded_anew):
    assert rectified()
    (kept,) = loaded_anew.glob("distopt-*.cubin")
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-1], b"[1]" + whole):
        kept.write_bytes(damaged)
        monkeypatch.setattr(cuda, "_functions", {})
        assert rectified()
        assert kept.read_bytes() == whole
    monkeypatch.setattr(cuda, "_functions", {})
    monkeypatch.setattr(cuda, "compiled", None)
    assert rectified()


def test_a_cache_that_cannot_be_read_or_written_is_told(monkeypatch, caplog, loaded_anew):
    read = Path.read_bytes

    def guarded(path):
        if path.suffix == ".cubin":
            raise PermissionError(path)
        return read(path)

    def full(path):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "read_bytes", guarded)
    monkeypatch.setattr(cuda, "atomic_write", full)
    with caplog.at_level(logging.WARNING, "distopt"):
        assert rectified()
    assert "no space left" in caplog.text
    assert "CUPY_CACHE_DIR" in caplog.text
