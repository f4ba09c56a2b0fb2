"""Where NCCL is found, which GPU belongs to which rank, and what is said where something is missing."""

import subprocess
import sys
import types
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import Mock

import pytest

from distopt.comm import gpu
from distopt.comm.gpu import GpuOfRank, choose_devices, find_nccl
from distopt.errors import LaunchError, MissingDependencyError
from tests.unit.refusals import refused

ALL = ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0")
INSTALL = r"pip install --upgrade 'cupy-cuda13x\[ctk\]' "


def test_the_library_is_named_or_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libnccl.so.2.1"
    library.touch()
    (tmp_path / "libnccl.so.2").symlink_to(library)
    assert find_nccl(13, {"DISTOPT_NCCL_LIBRARY": str(tmp_path / "libnccl.so.2")}) == str(library)
    error, absent = r"DISTOPT_NCCL_LIBRARY=/nowhere/libnccl\.so is not a file", "/nowhere/libnccl.so"
    refused(MissingDependencyError, error, find_nccl, 13, {"DISTOPT_NCCL_LIBRARY": absent})
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()

    def distribution(name: str) -> object:
        if name != "nvidia-nccl-cu12":
            raise PackageNotFoundError(name)
        return types.SimpleNamespace(locate_file=tmp_path.joinpath)

    monkeypatch.setattr(gpu, "distribution", distribution)
    assert find_nccl(12, {}) == str(library)
    error = r"nvidia-nccl-cu13 is not installed; pip install --upgrade 'cupy-cuda13x\[ctk\]' nvidia-nccl-cu13 "
    refused(MissingDependencyError, error, find_nccl, 13, {})
    library.unlink()
    refused(MissingDependencyError, "without its libnccl", find_nccl, 12, {})


def places(*seen: tuple[str, ...], chosen: int | None = None, machine: str = "a") -> list[GpuOfRank]:
    return [GpuOfRank(machine, f"host-{machine}", 100 + rank, gpus, chosen) for rank, gpus in enumerate(seen)]


def mapping(*chosen: int | None) -> list[GpuOfRank]:
    return [GpuOfRank("a", "host-a", 100 + rank, ALL, number) for rank, number in enumerate(chosen)]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (places(ALL, ALL, ALL), [0, 1, 2]),
        (places(ALL[:1], ALL[1:2], ALL[2:3]), [0, 0, 0]),  # srun --gpus-per-task=1
        (places(ALL[:2], ALL[2:], ALL[:2]), [0, 0, 1]),
        (places(ALL[:2], ALL[:2]) + places(ALL[:2], ALL[:2], machine="b"), [0, 1, 0, 1]),
        (places(ALL, chosen=2) + places(ALL[:1]), [2, 0]),  # the script has chosen
        (mapping(1, 0), [1, 0]),
        (mapping(3, 2, 1, 0), [3, 2, 1, 0]),
        (mapping(1, None), [1, 0]),  # number 0, which CUDA also has where nothing was chosen
        (mapping(3, 2, 1, None), [3, 2, 1, 0]),
        (mapping(None, 3, None, None), [0, 3, 2, 1]),
    ],
)
def test_every_rank_gets_a_gpu_of_its_own(ranks: list[GpuOfRank], expected: list[int]) -> None:
    assert choose_devices(ranks, 22705, {}) == expected


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (places(ALL[:2], ALL[:2], ALL[:2]), r"ranks 0 and 2 on host-a \(pids 100 and 102\) .* GPU 0000:01:00.0, of 2"),
        (places(ALL[3:], ALL[3:]), r"ranks 0 and 1 on host-a .* GPU 0000:04:00.0, of 1 .*CUDA_VISIBLE_DEVICES"),
        (mapping(1, 1), r"ranks 0 and 1 .* GPU 0000:02:00.0, .*each local rank its own"),
        (mapping(None, 0, 0), r"ranks 1 and 2 "),
        (places(ALL[:2], ALL[:1]), r"ranks 0 and 1 .* GPU 0000:01:00.0"),  # sets that overlap
    ],
)
def test_a_gpu_for_two_ranks_is_refused_by_name_unless_nccl_is_told_to_allow_it(
    ranks: list[GpuOfRank], words: str
) -> None:
    refused(LaunchError, words, choose_devices, ranks, 22705, {})
    ranks, env = places(ALL[:1], ALL[:1]), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert choose_devices(ranks, 23000, env) == [0, 0]
    refused(LaunchError, "would both use", choose_devices, ranks, 22999, env)


def cupy(error: str = "") -> types.ModuleType:
    """Stands in for CuPy of CUDA 13 on two GPUs, or with an error where it looks for them."""
    module = types.ModuleType("cupy")
    count = Mock(return_value=2, side_effect=RuntimeError(error) if error else None)
    runtime = types.SimpleNamespace(runtimeGetVersion=lambda: 13000, getDeviceCount=count)
    module.cuda = types.SimpleNamespace(runtime=runtime, nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)))
    return module


@pytest.mark.parametrize(
    ("driver", "module", "nccl", "words"),
    [
        (0, None, "", r"no driver of NVIDIA \(libcuda.so.1: cannot open.*\); install one for CUDA 12 or later"),
        (12080, None, "", r"CuPy cannot be used \(.*\); pip install --upgrade 'cupy-cuda12x\[ctk\]' "),
        (13000, None, "", rf"CuPy cannot be used \(.*\); {INSTALL}"),
        (12080, cupy("insufficient"), "", r"no GPU answers \(insufficient\); pip install --upgrade 'cupy-cuda12x"),
        (13000, cupy("no device"), "", r"no GPU answers \(no device\); see what nvidia-smi says, .*VISIBLE_DEVICES"),
        (13000, cupy(), "", rf"nvidia-nccl-cu13 is not installed; {INSTALL}"),
        (13000, cupy(), "is NCCL 2.17.1; 2.18.0 is the oldest", r"is NCCL 2.17.1; .*; pip install"),
        (13000, cupy(), "good", None),
    ],
)
def test_one_line_says_what_is_missing_and_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: int, module: object, nccl: str, words: str | None
) -> None:
    no_driver = RuntimeError("libcuda.so.1: cannot open shared object file")
    library = tmp_path / "libnccl.so.2"
    nccl_error = None if nccl == "good" else RuntimeError(f"{library} {nccl}")
    for owner, name, value, error in (
        (gpu._core, "cuda_driver_version", driver, None if driver else no_driver),
        (gpu._core, "nccl_version", 22705, nccl_error),
        (gpu, "distribution", None, PackageNotFoundError("cupy")),
    ):
        monkeypatch.setattr(owner, name, Mock(return_value=value, side_effect=error))
    monkeypatch.setitem(sys.modules, "cupy", module)  # type: ignore[arg-type]
    monkeypatch.delenv("DISTOPT_NCCL_LIBRARY", raising=False)
    if nccl:
        library.touch()
        monkeypatch.setenv("DISTOPT_NCCL_LIBRARY", str(library))
    assert gpu.driver_version() == driver
    if words is None:
        assert gpu.gpu_stack().nccl_version == 22705
    else:
        assert refused(MissingDependencyError, words, gpu.gpu_stack).exit_code == 2


def test_importing_loads_no_driver() -> None:
    code = "import distopt.comm.nccl; print('libcuda' in open('/proc/self/maps').read())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "False\n", ended.stderr
