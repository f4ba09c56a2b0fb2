"""Devices, and their absence: the CPU takes the place of a GPU."""

import logging
import re
import sys
import types

import numpy as np
import pytest

from distopt import device, opt, singa_wrap
from distopt.errors import MissingDependencyError, UsageError


@pytest.fixture
def untold(monkeypatch):
    monkeypatch.setattr("distopt.nn.notices._told", set())
    monkeypatch.delenv("DISTOPT_DEVICE", raising=False)


def fake_cupy(monkeypatch, count):
    """A module in the place of CuPy that sees `count` GPUs; None: the driver is too old, 0: NVRTC is absent."""

    def device_count():
        if count is None:
            raise RuntimeError("cudaErrorInsufficientDriver: driver version is insufficient")
        return count

    def compiler_version():
        if count == 0:
            raise RuntimeError("CuPy failed to load libnvrtc.so.13")
        return 13, 0

    used = []
    cupy = types.ModuleType("cupy")
    runtime = types.SimpleNamespace(getDeviceCount=device_count, runtimeGetVersion=lambda: 13000)
    cupy.cuda = types.SimpleNamespace(
        runtime=runtime,
        nvrtc=types.SimpleNamespace(getVersion=compiler_version),
        Device=lambda index: types.SimpleNamespace(use=lambda: used.append(index)),
    )
    cupy.random = np.random
    cupy.asarray, cupy.asnumpy = np.asarray, np.asarray
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr("distopt._core.cuda_driver_version", lambda: 12080 if count is None else 13000)
    monkeypatch.setattr("distopt.nn.devices.device._gpus", {})
    return used


def _no_driver():
    raise RuntimeError("libcuda.so.1: cannot open shared object file")


def test_the_cpu_is_one_device():
    cpu = device.get_default_device()
    assert cpu is device.create_cpu_device()
    assert (cpu.id(), cpu.lang(), cpu.kind, cpu.xp) == (0, "kCpp", "cpu", np)
    cpu.Sync()
    array = np.zeros(3)
    assert cpu.host(array) is array


def test_graph_switch_is_remembered():
    cpu = device.get_default_device()
    cpu.EnableGraph(True)
    assert cpu.graph_enabled()
    cpu.ResetGraph()
    cpu.EnableGraph(False)
    assert not cpu.graph_enabled()
    cpu.EnableGraph("True")  # as SINGA's examples do
    assert cpu.graph_enabled() is True
    cpu.EnableGraph(False)
    device.enable_lazy_alloc(True)


def test_seed_starts_the_generator_anew():
    cpu = device.get_default_device()
    cpu.SetRandSeed(5)
    first = cpu.rng.random(4)
    cpu.SetRandSeed(5)
    np.testing.assert_array_equal(first, cpu.rng.random(4))
    assert not np.array_equal(first, cpu.rng.random(4))
    for seed in (-1, 2.5, "a", None):
        with pytest.raises(UsageError, match=f"seed of random numbers is {seed!r}; it must be an integer"):
            cpu.SetRandSeed(seed)


@pytest.mark.parametrize(
    ("count", "missing"),
    [
        (None, "no GPU answers (cudaErrorInsufficientDriver: driver version is insufficient); pip install "),
        (0, "CuPy finds no NVRTC to compile kernels (CuPy failed to load libnvrtc.so.13); pip install "),
        ("no cupy", "pip install --upgrade 'cupy-cuda13x[ctk]' nvidia-nccl-cu13 "),
    ],
)
def test_without_a_gpu_the_cpu_is_used_with_one_notice(monkeypatch, caplog, untold, count, missing):
    fake_cupy(monkeypatch, count)
    if count == "no cupy":
        monkeypatch.setitem(sys.modules, "cupy", None)
    with caplog.at_level(logging.WARNING, "distopt"):
        for _ in range(2):
            assert device.create_cuda_gpu_on(1) is device.get_default_device()
            assert device.create_cuda_gpu() is device.get_default_device()
            assert device.create_cuda_gpus(2) == [device.get_default_device()] * 2
    assert (device.get_num_gpus(), device.get_gpu_ids(), singa_wrap.USE_CUDA) == (0, [], False)
    (record,) = caplog.records
    assert record.message.startswith("using the CPU: ")
    assert "\n" not in record.message
    monkeypatch.setenv("DISTOPT_DEVICE", "cuda")
    for _ in range(2):
        with pytest.raises(MissingDependencyError, match=re.escape(missing)):
            device.create_cuda_gpu()


@pytest.mark.parametrize("error", [RuntimeError("cudaErrorDevicesUnavailable: busy"), MemoryError("out of memory")])
def test_a_gpu_that_others_hold_is_left_to_them_with_one_notice(monkeypatch, caplog, untold, error):
    fake_cupy(monkeypatch, 1)

    def refuse(index):
        raise error

    monkeypatch.setattr(sys.modules["cupy"].cuda, "Device", refuse)
    optimizer = opt.DistOpt(opt.SGD())
    with caplog.at_level(logging.WARNING, "distopt"):
        for _ in range(2):
            assert optimizer.device is device.get_default_device()
            assert device.create_cuda_gpu() is device.get_default_device()
    (record,) = caplog.records
    assert record.message.startswith(
        f"using the CPU: GPU 0 cannot be used ({error}); end the processes that nvidia-smi"
    )
    assert "\n" not in record.message
    monkeypatch.setenv("DISTOPT_DEVICE", "cuda")
    with pytest.raises(MissingDependencyError, match="DISTOPT_DEVICE=cuda, but GPU 0 cannot be used"):
        assert opt.DistOpt(opt.SGD()).device


def test_without_a_driver_an_optimizer_takes_the_cpu_in_silence(monkeypatch, caplog, untold):
    monkeypatch.setattr("distopt._core.cuda_driver_version", _no_driver)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with caplog.at_level(logging.WARNING, "distopt"):
        assert opt.DistOpt(opt.SGD()).device is device.get_default_device()
    assert not caplog.records


def test_the_cpu_can_be_asked_for(monkeypatch, caplog, untold):
    fake_cupy(monkeypatch, 2)
    monkeypatch.setenv("DISTOPT_DEVICE", "cpu")
    assert device.create_cuda_gpu_on(1) is device.get_default_device()
    assert (device.get_num_gpus(), singa_wrap.USE_CUDA) == (0, False)
    assert not caplog.records


def test_random_numbers_are_refused_while_a_step_is_captured():
    gpu = device.Device("cuda", 0, np)
    gpu.capturing = "forward"
    with pytest.raises(UsageError, match="would be the same in every replay"):
        gpu.rng.random(3)
    gpu.capturing = ""
    assert gpu.rng.random(3).shape == (3,)


def test_a_gpu_is_one_device_and_becomes_the_current_one(monkeypatch, caplog, untold):
    used = fake_cupy(monkeypatch, 2)
    gpu = device.create_cuda_gpu_on(1)
    assert gpu is device.create_cuda_gpu_on(1)
    assert (gpu.id(), gpu.lang(), gpu.kind, repr(gpu)) == (1, "kCuda", "cuda", "cuda:1")
    assert gpu.xp is sys.modules["cupy"]
    assert used == [1, 1]
    assert singa_wrap.USE_CUDA is True
    assert device.get_gpu_ids() == [0, 1]
    assert [gpu.id() for gpu in device.create_cuda_gpus(2)] == [0, 1]
    assert device.create_cuda_gpus_on([1])[0] is gpu
    for index in (2, -1):
        with pytest.raises(UsageError, match=f"no GPU {index}: 2 visible"):
            device.create_cuda_gpu_on(index)
    assert not caplog.records
