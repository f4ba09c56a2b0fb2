"""The kernels as they are declared, compiled and launched."""

from __future__ import annotations

import re

import pytest

from distopt.errors import MissingDependencyError, UsageError
from tests.gpu import require_gpu

require_gpu()

import cupy  # noqa: E402

from distopt.kernels import cuda  # noqa: E402
from distopt.nn.kernels import gpu as nn_gpu  # noqa: E402
from distopt.nn.kernels import gpu_base  # noqa: E402


def negatives(n: int = 4):
    return cupy.arange(-n, 0, dtype=cupy.float32), cupy.empty(n, cupy.float32)


def test_every_kernel_of_every_source_is_known():
    for path in cuda._FOLDER.glob("*.cu"):
        declared = re.findall(r"__global__", path.read_text())
        known = {name.partition("<")[0] for name, kernel in cuda.kernels().items() if kernel.source == path.name}
        assert len(declared) == len(known), path.name
    assert cuda.kernels()["find_beyond"].parameters == ("*", "size_t", "float", "*")
    assert len(cuda.program("codec.cu")["name_expressions"]) == 2 * 2 + 3
    assert {"encode<Half>", "encode<BFloat16>"} <= cuda.kernels().keys()


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


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder of sources in the place of the package's."""
    (tmp_path / "wrong.cuh").write_text("#pragma once\nconstexpr int one = 1;\n")
    (tmp_path / "wrong.cu").write_text('#include "wrong.cuh"\n\n__global__ void wrong(int* x) { *x = one + two; }\n')
    monkeypatch.setattr(cuda, "_FOLDER", tmp_path)
    cuda.kernels.cache_clear()
    yield tmp_path
    cuda.kernels.cache_clear()


def test_an_error_of_the_compiler_names_the_line_the_versions_and_the_cure(folder):
    with pytest.raises(MissingDependencyError) as caught:
        cuda.launch("wrong", (1,), (1,), cupy.zeros(1, cupy.int32))
    text = str(caught.value)
    assert re.search(r"wrong\.cu[(:]3\b", text), text
    assert "two" in text
    assert f"NVRTC of CUDA {'.'.join(map(str, cupy.cuda.nvrtc.getVersion()))} with CuPy {cupy.__version__}" in text
    assert "pip install" in text


def test_what_is_compiled_depends_on_the_headers(folder):
    before = cuda.program("wrong.cu")
    assert cuda.program("wrong.cu") == before
    (folder / "wrong.cuh").write_text("#pragma once\nconstexpr int one = 2;\n")
    assert cuda.program("wrong.cu")["code"] != before["code"]
