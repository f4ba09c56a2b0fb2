"""Devices, and their absence: the CPU takes the place of a GPU."""

import re
import sys
import types
from unittest.mock import Mock

import numpy as np
import pytest

from distopt import device, opt, singa_wrap
from distopt.errors import MissingDependencyError, UsageError
from tests.unit.refusals import refused


def fake_cupy(monkeypatch, count):
    """A module in the place of CuPy that sees `count` GPUs; None: the driver is too old, 0: NVRTC is absent."""
    too_old = RuntimeError("cudaErrorInsufficientDriver: driver version is insufficient") if count is None else None
    no_compiler = RuntimeError("CuPy failed to load libnvrtc.so.13") if count == 0 else None
    used = []
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(
        runtime=Mock(getDeviceCount=Mock(return_value=count, side_effect=too_old), runtimeGetVersion=lambda: 13000),
        nvrtc=Mock(getVersion=Mock(return_value=(13, 0), side_effect=no_compiler)),
        Device=lambda index: types.SimpleNamespace(use=lambda: used.append(index)),
    )
    cupy.random = np.random
    cupy.asarray, cupy.asnumpy = np.asarray, np.asarray
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr("distopt._core.cuda_driver_version", lambda: 12080 if count is None else 13000)
    monkeypatch.setattr("distopt.nn.devices.device._gpus", {})
    return used


def test_the_cpu_is_one_device_with_a_switch_and_a_seed():
    cpu = device.get_default_device()
    assert cpu is device.create_cpu_device()
    assert (cpu.id(), cpu.lang(), cpu.kind, cpu.xp) == (0, "kCpp", "cpu", np)
    cpu.Sync()
    array = np.zeros(3)
    assert cpu.host(array) is array
    for given in (True, False, "True", False):  # text as in SINGA's examples
        cpu.EnableGraph(given)
        assert cpu.graph_enabled() is bool(given)
        cpu.ResetGraph()
    device.enable_lazy_alloc(True)
    cpu.SetRandSeed(5)
    first = cpu.rng.random(4)
    cpu.SetRandSeed(5)
    np.testing.assert_array_equal(first, cpu.rng.random(4))
    assert not np.array_equal(first, cpu.rng.random(4))
    for seed in (-1, 2.5, "a", None):
        refused(UsageError, f"seed of random numbers is {seed!r}; it must be an integer", cpu.SetRandSeed, seed)


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
    for _ in range(2):
        assert device.create_cuda_gpu_on(1) is device.get_default_device()
        assert device.create_cuda_gpu() is device.get_default_device()
        assert device.create_cuda_gpus(2) == [device.get_default_device()] * 2
    assert (device.get_num_gpus(), device.get_gpu_ids(), singa_wrap.USE_CUDA) == (0, [], False)
    (record,) = caplog.records
    assert re.fullmatch("using the CPU: .*", record.message)
    monkeypatch.setenv("DISTOPT_DEVICE", "cuda")
    for _ in range(2):
        refused(MissingDependencyError, re.escape(missing), device.create_cuda_gpu)


@pytest.mark.parametrize("error", [RuntimeError("cudaErrorDevicesUnavailable: busy"), MemoryError("out of memory")])
def test_a_gpu_that_others_hold_is_left_to_them_with_one_notice(monkeypatch, caplog, untold, error):
    fake_cupy(monkeypatch, 1)
    monkeypatch.setattr(sys.modules["cupy"].cuda, "Device", Mock(side_effect=error))
    optimizer = opt.DistOpt(opt.SGD())
    for _ in range(2):
        assert optimizer.device is device.get_default_device()
        assert device.create_cuda_gpu() is device.get_default_device()
    (record,) = caplog.records
    said = f"using the CPU: GPU 0 cannot be used ({error}); end the processes that nvidia-smi"
    assert re.fullmatch(f"{re.escape(said)}.*", record.message)
    monkeypatch.setenv("DISTOPT_DEVICE", "cuda")
    said = "DISTOPT_DEVICE=cuda, but GPU 0 cannot be used"
    refused(MissingDependencyError, said, lambda: opt.DistOpt(opt.SGD()).device)


def test_the_cpu_is_taken_in_silence_without_a_driver_or_where_it_is_asked_for(monkeypatch, caplog, untold):
    no_driver = Mock(side_effect=RuntimeError("libcuda.so.1: cannot open shared object file"))
    monkeypatch.setattr("distopt._core.cuda_driver_version", no_driver)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert opt.DistOpt(opt.SGD()).device is device.get_default_device()
    assert not caplog.records
    fake_cupy(monkeypatch, 2)
    monkeypatch.setenv("DISTOPT_DEVICE", "cpu")
    assert device.create_cuda_gpu_on(1) is device.get_default_device()
    assert (device.get_num_gpus(), singa_wrap.USE_CUDA) == (0, False)
    assert not caplog.records


def test_random_numbers_are_refused_while_a_step_is_captured():
    gpu = device.Device("cuda", 0, np)
    gpu.capturing = "forward"
    refused(UsageError, "would be the same in every replay", lambda: gpu.rng.random(3))
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
        refused(UsageError, f"no GPU {index}: 2 visible", device.create_cuda_gpu_on, index)
    assert not caplog.records
