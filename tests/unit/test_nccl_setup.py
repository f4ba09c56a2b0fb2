"""Where NCCL is found, which GPU belongs to which rank, and what is said where something is missing."""

import subprocess
import sys
import types
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from distopt.comm import gpu
from distopt.comm.gpu import Place, choose_devices, find_nccl
from distopt.errors import LaunchError, MissingDependencyError


# -- the library -------------------------------------------------------------------------------------------------------
def test_the_named_library_comes_first(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2.1"
    library.touch()
    (tmp_path / "libnccl.so.2").symlink_to(library)
    assert find_nccl(13, {"DISTOPT_NCCL_LIBRARY": str(tmp_path / "libnccl.so.2")}) == str(library)


def test_a_named_library_that_is_absent_is_an_error() -> None:
    with pytest.raises(MissingDependencyError, match=r"DISTOPT_NCCL_LIBRARY=/nowhere/libnccl\.so is not a file"):
        find_nccl(13, {"DISTOPT_NCCL_LIBRARY": "/nowhere/libnccl.so"})


def test_the_wheel_of_the_same_cuda_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()

    def distribution(name: str) -> object:
        if name != "nvidia-nccl-cu12":
            raise PackageNotFoundError(name)
        file = types.SimpleNamespace(name="libnccl.so.2", locate=lambda: library)
        return types.SimpleNamespace(files=[types.SimpleNamespace(name="nccl.h", locate=lambda: tmp_path), file])

    monkeypatch.setattr(gpu, "distribution", distribution)
    assert find_nccl(12, {}) == str(library)
    with pytest.raises(
        MissingDependencyError,
        match=r"nvidia-nccl-cu13 is not installed; pip install --upgrade 'cupy-cuda13x\[ctk\]' nvidia-nccl-cu13 ",
    ):
        find_nccl(13, {})
    library.unlink()
    with pytest.raises(MissingDependencyError, match="without its libnccl"):
        find_nccl(12, {})


# -- GPUs --------------------------------------------------------------------------------------------------------------
ALL = ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0")


def places(*seen: tuple[str, ...], current: int = 0, machine: str = "a") -> list[Place]:
    return [Place(machine, f"host-{machine}", 100 + rank, gpus, current) for rank, gpus in enumerate(seen)]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (places(ALL, ALL, ALL), [0, 1, 2]),
        (places(ALL[:1], ALL[1:2], ALL[2:3]), [0, 0, 0]),  # srun --gpus-per-task=1
        (places(ALL[:2], ALL[2:], ALL[:2]), [0, 0, 1]),
        (places(ALL[:2], ALL[:2]) + places(ALL[:2], ALL[:2], machine="b"), [0, 1, 0, 1]),
        (places(ALL, current=2) + places(ALL[:1]), [2, 0]),  # the script has chosen
    ],
)
def test_every_rank_gets_a_gpu_of_its_own(ranks: list[Place], expected: list[int]) -> None:
    assert choose_devices(ranks, 22705, {}) == expected


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (places(ALL[:2], ALL[:2], ALL[:2]), r"ranks 0 and 2 on host-a \(pids 100 and 102\) .* GPU 0000:01:00.0, of 2"),
        (places(ALL[3:], ALL[3:]), r"ranks 0 and 1 on host-a .* GPU 0000:04:00.0, of 1 .*CUDA_VISIBLE_DEVICES"),
        (places(ALL[:2], ALL[:1]), r"ranks 0 and 1 .* GPU 0000:01:00.0"),  # sets that overlap
    ],
)
def test_a_gpu_for_two_ranks_is_refused_by_name(ranks: list[Place], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        choose_devices(ranks, 22705, {})


def test_a_gpu_for_two_ranks_where_nccl_is_told_to_allow_it() -> None:
    ranks, env = places(ALL[:1], ALL[:1]), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert choose_devices(ranks, 23000, env) == [0, 0]
    with pytest.raises(LaunchError, match="would both use"):
        choose_devices(ranks, 22999, env)


# -- what is missing ---------------------------------------------------------------------------------------------------
class Cuda(types.ModuleType):
    """Stands in for `distopt._cuda`."""

    def __init__(self, count: int, nccl: str = "") -> None:
        super().__init__("distopt._cuda")
        self._count, self._nccl = count, nccl

    def device_count(self) -> int:
        if self._count < 0:
            raise RuntimeError("cudaGetDeviceCount(&count): driver is insufficient (CUDA error 35)")
        return self._count

    def runtime_version(self) -> int:
        return 13000

    def nccl_version(self, path: str) -> int:
        if self._nccl:
            raise RuntimeError(f"{path} {self._nccl}")
        return 22705


def fake_cupy() -> types.ModuleType:
    cupy = types.ModuleType("cupy")
    runtime = types.SimpleNamespace(runtimeGetVersion=lambda: 13000, getDeviceCount=lambda: 2)
    cupy.cuda = types.SimpleNamespace(runtime=runtime)  # type: ignore[attr-defined]
    return cupy


@pytest.mark.parametrize(
    ("cuda", "cupy", "nccl", "words"),
    [
        (None, None, None, r"built without CUDA \(.*\); install the CUDA toolkit"),
        (Cuda(-1), None, None, r"no GPU answers \(.*CUDA error 35\)\); install NVIDIA's driver for CUDA 13 or later"),
        (Cuda(0), None, None, r"no GPU is visible .*CUDA_VISIBLE_DEVICES"),
        (Cuda(2), None, None, r"CuPy cannot be used \(.*\); pip install --upgrade 'cupy-cuda13x\[ctk\]' "),
        (
            Cuda(2),
            fake_cupy(),
            None,
            r"nvidia-nccl-cu13 is not installed; pip install --upgrade 'cupy-cuda13x\[ctk\]' ",
        ),
        (Cuda(2, "is NCCL 2.17.1; 2.18.0 is the oldest"), fake_cupy(), "any", r"is NCCL 2.17.1; .*; pip install"),
        (Cuda(2), fake_cupy(), "any", None),
    ],
)
def test_one_line_says_what_is_missing_and_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: object, cupy: object, nccl: str | None, words: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "distopt._cuda", cuda)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]
    monkeypatch.delenv("DISTOPT_NCCL_LIBRARY", raising=False)

    def distribution(name: str) -> object:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(gpu, "distribution", distribution)
    if nccl:
        (tmp_path / "libnccl.so.2").touch()
        monkeypatch.setenv("DISTOPT_NCCL_LIBRARY", str(tmp_path / "libnccl.so.2"))
    if words is None:
        assert gpu.gpu_stack().nccl_version == 22705
        return
    with pytest.raises(MissingDependencyError, match=words) as info:
        gpu.gpu_stack()
    assert "\n" not in str(info.value)
    assert info.value.exit_code == 2


def test_the_extension_imports_without_a_driver() -> None:
    """The real one, where it is built."""
    code = (
        "import importlib.util, sys\n"
        "if importlib.util.find_spec('distopt._cuda') is None: sys.exit(77)\n"
        "from distopt import _cuda\n"
        "print(_cuda.runtime_version())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if ended.returncode == 77:
        pytest.skip("distopt was built without CUDA")
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) >= 11000
