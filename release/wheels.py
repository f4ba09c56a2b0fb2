"""Build the wheels: python -m release.wheels [--out dist] [--machines x86_64 aarch64] [PYTHON ...]

Each PYTHON is a version or the path of an interpreter, as uv takes them; uv finds or downloads it. Zig's Clang compiles
for each machine against an old glibc, so that the wheels serve every Linux since then. Another machine's wheel is
compiled with the headers of this one's Python, which must not differ between machines, as Debian's do.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC = "2.28"
MACHINES = ("x86_64", "aarch64")
PYTHONS = ("3.10", "3.11", "3.12")  # the last one's wheel serves later versions, too
LIMIT_BYTES = 3_000_000
PROGRESS_SECONDS = 5.0


def compiler(folder: Path, machine: str) -> dict[str, str]:
    """Programs for CMake, which takes paths without arguments, and the machine: the value of each of its variables."""
    zig = Path(find_spec("ziglang").origin).with_name("zig")
    folder.mkdir(parents=True, exist_ok=True)
    made = {} if machine == platform.machine() else {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": machine}
    for variable, name, command in (
        # Debian's Python has one of its headers there.
        ("CMAKE_CXX_COMPILER", "c++", f"c++ -target {machine}-linux-gnu.{GLIBC} -idirafter /usr/include"),
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


def build(python: str, machine: str, work: Path) -> Path:
    """The wheel of one Python for one machine, not yet named after the glibc that it needs."""
    programs = compiler(work / "zig", machine)
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
    if machine != platform.machine():  # after which it is named
        run(tool("wheel"), "tags", "--remove", "--platform-tag", f"linux_{machine}", next(raw.glob("*.whl")))
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


def make(out: Path, pythons: Sequence[str] = PYTHONS, machines: Sequence[str] = MACHINES[:1]) -> None:
    """Build, check and list them; earlier wheels in `out` are removed."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.whl"):
        old.unlink()
    for machine, python in itertools.product(machines, pythons):
        work = ROOT / "build" / "wheels" / machine
        wheel = repair(build(python, machine, work), out, work)
        if "-abi3-" in wheel.name:
            run(tool("abi3audit"), "--strict", wheel)
        run(tool("twine"), "check", "--strict", wheel)
        print(f"{wheel.stat().st_size:,} bytes  {wheel}", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", default=PYTHONS, metavar="PYTHON")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--machines", nargs="+", default=MACHINES[:1], choices=MACHINES)
    options = parser.parse_args()
    make(options.out, options.pythons, options.machines)


if __name__ == "__main__":
    main()
