"""Test the aarch64 wheels in dist under qemu's emulation of that processor: python -m release.emulated [SUITE ...]

Each SUITE is a release of Debian, whose packages for arm64 give the libraries and Python; the wheel for that Python is
installed beside them. Needs apt, dpkg and qemu-user-static, and neither root nor binfmt_misc. Qemu runs ARM's
instructions, but with the memory order of this machine, which is stronger on x86-64; see
instruments/model for the order.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .versions import ROOT, debian_site, tree, uv, wheel_for

WORK = ROOT / "build" / "emulated"
QEMU = "qemu-aarch64-static"
SUITES = ("bookworm", "trixie")  # Python 3.11 and 3.13
PLATFORM = "aarch64-manylinux_2_28"
DEBIAN_PACKAGES = ("python3", "libstdc++6")
PACKAGES = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
KERNELS = ("instruction_sets", "half", "codec_kernels", "reduce_kernels", "few_bits", "ops", "ops_pool", "ops_updates")
SHARED_MEMORY = ("conformance", "codecs", "codecs_on_transports", "sparse_all_reduce", "messages")
TESTS = (
    *(f"tests/unit/test_{name}.py" for name in KERNELS),
    *(f"tests/conformance/test_{name}.py" for name in SHARED_MEMORY),
)
LARGER_WORLDS = "shm-1 or shm-3 or shm-4 or SmallChunk"  # of the conformance tests; two ranks are enough here
JOB = ("examples/mnist_multiprocess.py", "2", "--max-epoch", "1")


def debian(suite: str, folder: Path) -> Path:
    """The files of Debian's packages for arm64, without their scripts having run; exits if apt fails."""
    made = folder / "debian"
    state, cache = folder / "apt" / "state", folder / "apt" / "cache"
    for path in (state / "lists" / "partial", cache / "archives" / "partial"):
        path.mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    (folder / "apt" / "sources.list").write_text(f"deb {debian_site()} {suite} main\n")
    (folder / "apt" / "apt.conf").write_text(
        f"""APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Dir::Etc::SourceList "{folder}/apt/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State "{state}";
Dir::State::status "{state}/status";
Dir::Cache "{cache}";
"""
    )
    configured = {**os.environ, "APT_CONFIG": str(folder / "apt" / "apt.conf")}
    for command in (("update",), ("install", "--download-only", "--yes", *DEBIAN_PACKAGES)):
        subprocess.run(["apt-get", "-qq", *command], env=configured, check=True)
    shutil.rmtree(made, ignore_errors=True)
    for package in sorted((cache / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, made], check=True)
    if not (made / "lib").exists():  # where the loader is sought
        (made / "lib").symlink_to("usr/lib")
    return made


def environment(folder: Path, root: Path, dist: Path) -> Path | None:
    """A Python of that machine with the wheel for it; None if a package has no version for it.

    It is a script that starts the emulator, so that programs which start Python by its path work here as they do there.
    """
    name = (root / "usr" / "bin" / "python3").readlink().name  # python3.11
    version = name.removeprefix("python")
    venv, python = folder / "venv", folder / "venv" / "bin" / "python"
    shutil.rmtree(venv, ignore_errors=True)
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shutil.which(QEMU)} -L {root} -0 "$0" {root}/usr/bin/{name} "$@"\n')
    python.chmod(0o755)
    (venv / "pyvenv.cfg").write_text(f"home = {root}/usr/bin\ninclude-system-site-packages = false\n")
    target = venv / "lib" / name / "site-packages"
    wheel = wheel_for(version, "aarch64", dist)
    install = (
        "pip",
        "install",
        "--quiet",
        "--target",
        target,
        "--python-platform",
        PLATFORM,
        "--python-version",
        version,
    )
    return python if uv(*install, "--only-binary", ":all:", wheel, *PACKAGES) else None


def test(python: Path, copy: Path, tests: Sequence[str], workers: str) -> bool:
    """Whether the tests pass, and the job, if there is the data set for it."""
    pytest = ("-m", "pytest", "-q", "-n", workers, "--part", "quick", "-k", f"not ({LARGER_WORLDS})", *tests)
    passed = subprocess.run([python, *pytest], cwd=copy).returncode == 0
    if "DISTOPT_DATA_DIR" in os.environ:
        passed &= subprocess.run([python, *JOB], cwd=copy).returncode == 0
    return passed


def main() -> None:
    """Test in each release, list how that ended, and exit with 1 unless all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", default=list(SUITES), metavar="SUITE")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--workers", default=str((os.cpu_count() or 1) + 1))
    options = parser.parse_args()
    missing = [name for name in ("apt-get", "dpkg", QEMU) if shutil.which(name) is None]
    if missing:
        sys.exit(f"emulated: {', '.join(missing)} missing: apt-get install qemu-user-static, on Debian")
    ended = {}
    for suite in options.suites:
        began, folder = time.monotonic(), WORK / suite
        python = environment(folder, debian(suite, folder), options.dist.resolve())
        passed = python is not None and test(python, tree(folder, python), options.tests, options.workers)
        ended[suite] = passed, time.monotonic() - began
    for suite, (passed, seconds) in ended.items():
        print(f"Debian {suite} for arm64: {'passed' if passed else 'failed'} in {seconds:.0f} s")
    sys.exit(not all(passed for passed, _ in ended.values()))


if __name__ == "__main__":
    main()
