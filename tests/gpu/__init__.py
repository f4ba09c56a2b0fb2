"""Tests on a GPU, or on the emulated one: `make test-gpu`, and `tests/unit/test_ops_gpu.py`."""

import pytest


def require_gpu() -> None:
    """Skip the module that calls it where nothing can be computed on a GPU, with the reason."""
    from distopt.kernels.discovery import find_cupy

    cupy, missing = find_cupy()
    if cupy is None:
        pytest.skip(missing, allow_module_level=True)
