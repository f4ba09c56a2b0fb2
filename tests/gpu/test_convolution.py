"""Convolution on a GPU, by cuDNN and by lowering: the tests of ops.cpu once more, and the choice between the two."""

from __future__ import annotations

import logging
import sys
import threading

import numpy as np
import pytest

from tests.gpu import require_gpu

require_gpu()

import cupy  # noqa: E402

from distopt import autograd, device  # noqa: E402
from distopt.errors import MissingDependencyError, UsageError  # noqa: E402
from distopt.nn.core.tensor import Tensor  # noqa: E402
from distopt.nn.devices.discovery import find_cudnn  # noqa: E402
from distopt.nn.kernels import gpu, gpu_cudnn, gpu_images  # noqa: E402
from distopt.nn.ops import convolution, pooling  # noqa: E402
from tests import reference  # noqa: E402
from tests.gpu.hosted import hosted, to_device  # noqa: E402
from tests.unit import test_ops as on_cpu  # noqa: E402
from tests.unit.test_ops import array, dtype, near, test_conv2d, test_conv2d_max_pool  # noqa: E402, F401 - collected


@pytest.fixture(params=["cudnn", "lowering"], autouse=True)
def road(request, monkeypatch):
    cudnn, missing = find_cudnn()
    if request.param == "cudnn" and cudnn is None:
        pytest.skip(missing)
    monkeypatch.setattr(on_cpu, "cpu", hosted)
    with gpu_cudnn.convolving_by(request.param):
        yield request.param


@pytest.fixture
def fresh(road, monkeypatch):
    """As in a process that has not convolved yet."""
    monkeypatch.setenv("DISTOPT_CONVOLUTION", road)
    monkeypatch.setattr(gpu_cudnn, "_thread", gpu_cudnn._Thread())
    monkeypatch.setattr("distopt.nn.notices._told", set())


@pytest.fixture
def isa():
    """The tests of the CPU ask for one."""


@pytest.fixture
def plans(monkeypatch):
    """The plans that have run."""
    run, ran = gpu_cudnn.Plan.__call__, []
    monkeypatch.setattr(gpu_cudnn.Plan, "__call__", lambda *args: ran.append(args[0]) or run(*args))
    return ran


def parts(case):
    """x, weight, bias, and the gradient of the result."""
    n, c, h, w, m, kernel, stride, padding = case
    x, weight = array((n, c, h, w), "float32"), array((m, c, *kernel), "float32", 1)
    y, _ = reference.conv2d(x, weight, None, stride, padding)
    return x, weight, array(m, "float32", 2), array(y.shape, "float32", 3)


def check(x, weight, bias, dy, stride=(1, 1), padding=(0, 0)):
    """Arrays of the device against the reference."""
    host = [a.get() for a in (x, weight, bias, dy)]
    y, saved = gpu.conv2d(x, weight, bias, stride, padding, True)
    dw, db = cupy.empty_like(weight), cupy.empty_like(bias)
    dx = gpu.conv2d_backward(dy, saved, dw, db)
    expected, saved = reference.conv2d(*host[:3], stride, padding, True)
    near(y.get(), expected)
    expected_dw, expected_db = np.empty_like(host[1]), np.empty_like(host[2])
    near(dx.get(), reference.conv2d_backward(host[3], saved, expected_dw, expected_db))
    near(dw.get(), expected_dw)
    near(db.get(), expected_db)


# -- numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", [2, 3])
def test_chunks(monkeypatch, dtype, case):  # noqa: F811
    monkeypatch.setattr(gpu_images, "SCRATCH_BYTES", 2500)
    on_cpu.test_conv2d(None, dtype, on_cpu.CONVOLUTIONS[case], True, True)
    on_cpu.test_conv2d_max_pool(None, dtype, on_cpu.FUSED[case], True, True)


@pytest.mark.parametrize("case", [2, 3])
def test_without_the_gradient_of_the_weight(monkeypatch, case):
    monkeypatch.setattr(gpu_images, "SCRATCH_BYTES", 2500)
    x, weight, bias, dy = map(to_device, parts(on_cpu.CONVOLUTIONS[case]))
    _, saved = gpu.conv2d(x, weight, bias, *on_cpu.CONVOLUTIONS[case][6:], True)
    found = [(dw, cupy.full_like(bias, 7)) for dw in (cupy.empty_like(weight), None)]
    whole, some = (gpu.conv2d_backward(dy, saved, dw, db) for dw, db in found)
    near(some.get(), whole.get())
    near(found[1][1].get(), found[0][1].get())


def test_arrays_may_begin_anywhere():
    """As gradients do in a bucket: cuDNN is promised 16 bytes."""
    given = [to_device(a) for a in parts((3, 2, 7, 6, 5, (3, 3), (1, 1), (0, 0)))]
    memory = cupy.full(sum(a.size + 1 for a in given) + 400, 7, "float32")
    moved, at = [], 1
    for one in given:
        moved.append(memory[at : at + one.size].reshape(one.shape))
        moved[-1][...] = one
        at += one.size + 1
    assert any(one.data.ptr % 16 for one in moved)
    check(*moved)
    at += at % 4 == 0
    dw = memory[at : at + given[1].size].reshape(given[1].shape)
    assert dw.data.ptr % 16
    _, saved = gpu.conv2d(moved[0], moved[1], None)
    gpu.conv2d_backward(moved[3], saved, dw, None, need_dx=False)
    assert memory[at - 1].item() == memory[at + dw.size].item() == 7
    expected = cupy.empty_like(given[1])
    gpu.conv2d_backward(given[3], saved, expected, None, need_dx=False)
    np.testing.assert_array_equal(dw.get(), expected.get())


WINDOWS = {
    "conv": (lambda: convolution.Conv2d((2, 1), (0, 1, 2, 1), True), (2, 2, 5, 4), (3, 2, 3, 2), (3,)),
    "grouped": (lambda: convolution.GroupedConv2d(2, (1, 2), (1, 0), True), (2, 4, 5, 4), (6, 2, 3, 2), (6,)),
    "depthwise": (
        lambda: convolution.DepthwiseConv2d((2, 1), (1, 0, 0, 2), True),
        (2, 3, 5, 4),
        (3, 1, 3, 2),
        (3,),
    ),
    "max pool": (lambda: pooling.MaxPool2d((2, 3), (2, 1), (0, 1, 1, 0)), (2, 2, 5, 4)),
    "avg pool": (lambda: pooling.AvgPool2d((2, 3), (2, 1), (0, 1, 1, 0)), (2, 2, 5, 4)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_groups_and_uneven_padding_are_as_on_the_cpu(monkeypatch, name):
    monkeypatch.setattr(autograd, "training", True)
    make, *shapes = WINDOWS[name]
    results = []
    for where in (device.get_default_device(), device.create_cuda_gpu()):
        data = [array(shape, "float32", i) for i, shape in enumerate(shapes)]
        inputs = [Tensor(data=values, device=where, stores_grad=True) for values in data]
        y = make()(*inputs)
        dy = Tensor(data=array(y.shape, "float32", 9), device=where)
        gradients_of = dict(autograd.backward(y, dy))
        results.append([t.to_numpy() for t in (y, *(gradients_of[t] for t in inputs))])
    for mine, other in zip(*results, strict=True):
        near(other, mine)


def test_nan_is_passed_on():
    x, weight, bias, _ = parts((1, 2, 6, 6, 3, (3, 3), (1, 1), (0, 0)))
    x[0, 1, 3, 4] = np.nan
    y, _ = gpu.conv2d(*map(to_device, (x, weight, bias)), relu=True)
    np.testing.assert_array_equal(np.isnan(y.get()), np.isnan(reference.conv2d(x, weight, bias)[0]))


def test_work_stays_on_the_current_stream():
    """No data is read before another stream has computed it, and later work finds the results."""
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
        given = [to_device(a) for a in parts((2, 3, 8, 9, 4, (3, 3), (1, 1), (1, 0)))]
        cupy.cuda.Device().synchronize()
        with stream:
            check(*map(gpu.relu, given), padding=(1, 0))
            stream.synchronize()


def test_threads_have_plans_of_their_own():
    given, errors = parts((2, 3, 8, 9, 4, (3, 3), (1, 1), (0, 0))), []

    def body():
        try:
            check(*map(to_device, given))
        except BaseException as error:
            errors.append(error)

    body()
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert not errors


# -- choice ------------------------------------------------------------------------------------------------------------
CASE = (2, 3, 8, 9, 4, (3, 3), (1, 1), (0, 0))


def test_the_road_is_the_one_asked_for(road, plans):
    for _ in range(2):
        check(*map(to_device, parts(CASE)))
    assert len(plans) == (6 if road == "cudnn" else 0)
    assert len(set(plans)) == len(plans) / 2, "plans are kept"


@pytest.mark.parametrize("lacks", [{"fprop"}, {"dgrad"}, {"wgrad"}, {"fprop", "dgrad", "wgrad"}])
def test_without_an_engine_lowering_takes_over(road, fresh, plans, lacks, monkeypatch, caplog):
    build_graph = gpu_cudnn.build_graph

    def build(cudnn, kind, *rest, **place):
        if kind in lacks:
            raise cudnn.cudnnGraphNotSupportedError("no such engine")
        return build_graph(cudnn, kind, *rest, **place)

    monkeypatch.setattr(gpu_cudnn, "build_graph", build)
    caplog.set_level(logging.INFO, "distopt")
    for _ in range(2):
        check(*map(to_device, parts(CASE)))
    told = [record.message for record in caplog.records if "so it is lowered: no such engine" in record.message]
    if road == "lowering":
        assert not plans
        assert not told
    else:
        backward = 0 if lacks & {"dgrad", "wgrad"} else 4
        assert len(plans) == backward + (0 if "fprop" in lacks else 2)
        assert sorted(text.split(" for ")[1][:5] for text in told) == sorted(lacks)


def test_a_refusal_is_told(road, fresh, plans, monkeypatch, caplog):
    """And with DISTOPT_CONVOLUTION=cudnn it is an error."""

    def build_graph(*_, **__):
        raise RuntimeError("CUDNN_STATUS_BAD_PARAM")

    monkeypatch.setattr(gpu_cudnn, "build_graph", build_graph)
    given = [to_device(a) for a in parts(CASE)]
    if road == "cudnn":
        with pytest.raises(RuntimeError, match="CUDNN_STATUS_BAD_PARAM"):
            check(*given)
    with gpu_cudnn.convolving_by("lowering" if road == "lowering" else "auto"):
        for _ in range(2):
            check(*given)
    assert not plans
    told = [r.message for r in caplog.records if "so it is lowered: CUDNN_STATUS_BAD_PARAM" in r.message]
    assert len(told) == (3 if road == "cudnn" else 0)


def test_without_cudnn(road, fresh, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    given = [to_device(a) for a in parts(CASE)]
    if road == "cudnn":
        with pytest.raises(MissingDependencyError, match=r"DISTOPT_CONVOLUTION=cudnn, but .*pip install"):
            check(*given)
    with gpu_cudnn.convolving_by("lowering" if road == "lowering" else "auto"):
        for _ in range(2):
            check(*given)
    told = [record.message for record in caplog.records if "convolution by" in record.message]
    assert [text.partition(": ")[0] for text in told] == (
        ["convolution by lowering and cuBLAS"] if road == "cudnn" else []
    )


@pytest.mark.parametrize("road", ["cudnn"], indirect=True)
def test_a_cudnn_that_does_not_start(road, fresh, monkeypatch):
    import cudnn

    def create_handle():
        raise RuntimeError("CUDNN_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(cudnn, "create_handle", create_handle)
    with pytest.raises(MissingDependencyError, match="cuDNN does not start"):
        gpu.conv2d(*map(to_device, parts(CASE)[:3]))


@pytest.mark.parametrize("road", ["cudnn"], indirect=True)
def test_a_frontend_without_cuda_bindings(road, fresh, monkeypatch, caplog):
    """Newer versions import it only when they plan."""
    import cudnn

    def pygraph(**_):
        raise ModuleNotFoundError("No module named 'cuda.bindings'", name="cuda.bindings")

    monkeypatch.setattr(cudnn, "pygraph", pygraph)
    given = [*map(to_device, parts(CASE)[:3])]
    with pytest.raises(
        MissingDependencyError, match=r"DISTOPT_CONVOLUTION=cudnn, but .*'cuda.bindings'\); pip install"
    ):
        gpu.conv2d(*given)
    with gpu_cudnn.convolving_by("auto"), caplog.at_level("WARNING", "distopt"):
        for _ in range(2):
            y, _ = gpu.conv2d(*given)
    np.testing.assert_allclose(y.get(), reference.conv2d(*parts(CASE)[:3])[0], rtol=1e-4, atol=1e-5)
    (record,) = caplog.records
    assert record.message.startswith("convolution by lowering and cuBLAS: cudnn-frontend ")
    assert record.message.endswith("(No module named 'cuda.bindings'); pip install cuda-bindings")


@pytest.mark.parametrize("road", ["cudnn"], indirect=True)
def test_float32_stays_float32_unless_tf32_is_asked_for(road, fresh, monkeypatch):
    import cudnn

    note = cudnn.numerical_note
    monkeypatch.delenv("CUPY_TF32", raising=False)
    assert {note.NONDETERMINISTIC, note.TENSOR_CORE} < set(gpu_cudnn._refused_notes(cudnn))
    monkeypatch.setenv("CUPY_TF32", "1")
    assert note.TENSOR_CORE not in gpu_cudnn._refused_notes(cudnn)
    assert note.NONDETERMINISTIC in gpu_cudnn._refused_notes(cudnn)
    x, weight, bias, _ = parts(CASE)
    y, _ = gpu.conv2d(*map(to_device, (x, weight, bias)))
    np.testing.assert_allclose(y.get(), reference.conv2d(x, weight, bias)[0], rtol=0, atol=0.05)


def test_the_environment_is_asked(road, fresh, monkeypatch):
    assert gpu_cudnn._thread.wish == road
    monkeypatch.setenv("DISTOPT_CONVOLUTION", "fft")
    with pytest.raises(UsageError, match="DISTOPT_CONVOLUTION='fft' is not one of auto, cudnn, lowering"):
        gpu_cudnn._Thread()
