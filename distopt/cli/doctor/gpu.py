"""Probes of the CUDA driver, the devices, CuPy and NCCL. All are optional."""

from __future__ import annotations

import os

from ...errors import DistoptError, pip_install
from .ask import ask, version_of
from .report import Finding, absent, failed, ok

_CUPY_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cupy")


def driver() -> Finding:
    """The CUDA version that the driver supports."""
    try:
        answer = ask("driver")
    except DistoptError as error:
        if "cannot open shared object" in str(error):
            return absent("no libcuda.so.1 (needed for NVIDIA GPUs only)")
        return failed(str(error), "reinstall the NVIDIA driver")
    return ok(f"supports CUDA {_dotted(answer['version'])}, {answer['path']}")


def devices() -> Finding:
    """The GPUs of this machine."""
    try:
        answer = ask("devices")
    except ModuleNotFoundError:
        return absent("not looked for: nvidia-ml-py is not installed" if _major() else "no NVIDIA GPU", _install())
    except DistoptError as error:
        if "NVMLError_LibraryNotFound" in str(error):
            return absent("no NVIDIA GPU")
        return failed(str(error), "see what nvidia-smi says; after an update of the driver, restart the machine")
    found = [f"{index}: {gpu['name']}{_memory(gpu['memory_bytes'])}" for index, gpu in enumerate(answer["devices"])]
    if not found:
        return absent(f"no NVIDIA GPU (driver {answer['driver']})")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = f"; CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
    return ok(f"{', '.join(found)} (driver {answer['driver']}){hidden}")


def cupy() -> Finding:
    """CuPy, which provides arrays and the CUDA runtime."""
    installed = [package for package in _CUPY_PACKAGES if version_of(package)]
    if not installed:
        return absent("not installed", _install())
    found = " and ".join(installed)
    if len(installed) > 1:
        return failed(f"{found} shadow each other", f"keep one: pip uninstall {' '.join(installed[1:])}")
    try:
        answer = ask("cupy", seconds=60.0)
    except (ImportError, DistoptError) as error:
        if not _major():
            return absent(f"{found} is installed, but there is no CUDA driver")
        return failed(f"{found}: {error}", _install())
    versions = f"CUDA runtime {_dotted(answer['runtime'])}, NVRTC {answer['nvrtc']}"
    return ok(f"{found} {answer['version']}, {versions}, {answer['devices']} devices")


def nccl() -> Finding:
    """NCCL, where communicators look for it."""
    if not _major():
        return absent("not looked for: there is no CUDA driver")
    package = next(filter(version_of, _CUPY_PACKAGES), "")
    try:
        answer = ask("nccl", package[9:11] or _major())
    except DistoptError as error:
        found, _, cure = str(error).partition("; ")
        return (absent if "not installed" in found else failed)(found, cure or _install())
    return ok(f"{answer['version']}, {answer['path']}")


def _install() -> str:
    """How to install a missing CUDA package; empty without a driver."""
    return pip_install(f"cuda{_major()}") if _major() else ""


def _major() -> str:
    """The major version of the driver's CUDA, as packages are named; empty without a driver."""
    try:
        return "12" if ask("driver")["version"] < 13000 else "13"
    except DistoptError:
        return ""


def _memory(count: int | None) -> str:
    return "" if count is None else f" ({count / 2**30:.0f} GiB)"


def _dotted(number: int) -> str:
    """CUDA's version number as text: 13020 is 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}"
