"""The kernels as they are declared, compiled and launched."""

import re

import pytest

from distopt.errors import MissingDependencyError, UsageError
from tests.gpu import require_gpu

require_gpu()

import cupy  # noqa: E402

from distopt.kernels import cuda, gpu  # noqa: E402
from distopt.nn.numerics import gpu_base  # noqa: E402


def test_every_kernel_of_every_source_is_known():
    for path in cuda._FOLDER.glob("*.cu"):
        declared = re.findall(r"__global__", path.read_text())
        known = {name.partition("<")[0] for name, (file, _) in cuda.kernels().items() if file == path.name}
        assert len(declared) == len(known), path.name
    assert cuda.kernels()["find_beyond"] == ("codec.cu", ("*", "size_t", "float", "*"))
    assert len(cuda.program("codec.cu")["name_expressions"]) == 2 * 2 + 4
    assert {"encode<Half>", "encode<BFloat16>"} <= cuda.kernels().keys()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (lambda x: (x.size, 1.0), ValueError),  # one is missing
        (lambda x: (x.size, 1.0, x, 1), ValueError),
        (lambda x: (x.size, 1.0, 0.5), TypeError),
        (lambda x: (x.size, 1.0, x.get()), TypeError),
        (lambda x: (-1, 1.0, x), OverflowError),
    ],
)
@pytest.mark.filterwarnings("error")
def test_arguments_that_do_not_fit_are_refused(arguments, error):
    x = cupy.ones(4, cupy.float32)
    with pytest.raises(error):
        cuda.launch("find_beyond", (1,), (32,), x, *arguments(x))
    with pytest.raises(KeyError):
        cuda.launch("decode<float>", (1,), (32,), x, x, x.size, 1.0)


def test_arrays_of_another_gpu_are_refused():
    """As in a thread that a script has made, where GPU 0 is the current one."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(1):
        square = cupy.ones((2, 2), cupy.float32)
        on_own = gpu_base.product(square, square)
    for use in (lambda: gpu.clip_scale(square, 1.0), lambda: gpu_base.product(square, square, on_own)):
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
