"""SINGA's `device` module."""

from __future__ import annotations

from .nn.device import Device, create_cpu_device, create_cuda_gpu, create_cuda_gpu_on, get_default_device

__all__ = ["Device", "create_cpu_device", "create_cuda_gpu", "create_cuda_gpu_on", "get_default_device"]
