"""Tests on a GPU, or on the emulated one: `make test-gpu`, and `tests/unit/test_ops_gpu.py`."""

from __future__ import annotations

import pytest


def require_gpu() -> None:
    """Skip the module that calls it where nothing can be computed on a GPU, with the reason."""
    from distopt import device

    try:
        from distopt import _cuda  # noqa: F401
    except ImportError as error:
        pytest.skip(f"distopt was built without _cuda ({error})", allow_module_level=True)
    cupy, missing = device.find_cupy()
    if cupy is None:
        pytest.skip(missing, allow_module_level=True)
