"""Builds the model of the shared-memory protocol and goes through it. As a script: all of it, with three ranks."""

import fcntl
import os
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "build" / "model"
# Ranks and faults of what `make model` goes through. Three ranks have fifty times the states of two.
LARGE = {"messages": [(2, 0)], "mixed": [(2, 2), (3, 0)], "pairs": [(2, 2)]}
USUAL = [(2, 2), (3, 1)]


def build() -> Path:
    """Compile what has changed; the program. Safe to call from several processes at once."""
    program = FOLDER / "check"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(path.stat().st_mtime for path in [*HERE.glob("*.cpp"), *HERE.glob("*.h")])
        if not program.exists() or program.stat().st_mtime < newest:
            compiler = os.environ.get("CXX", "c++")
            subprocess.run([compiler, "-O2", "-std=c++17", "-o", program, *sorted(HERE.glob("*.cpp"))], check=True)
    return program


def check(*arguments: object) -> tuple[bool, str]:
    """Run `check`, see main.cpp; whether all is well, and what it printed."""
    command = [build(), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"{command}: {ended.stderr or ended.returncode}")
    return ended.returncode == 0, ended.stdout


def listed(what: str) -> list[str]:
    return check(what)[1].split()


def main() -> None:
    print(f"{'program':20} {'ranks':>5} {'faults':>6}  result")
    for program in listed("programs"):
        for ranks, faults in LARGE.get(program, USUAL):
            began = time.monotonic()
            well, printed = check(ranks, faults, program)
            print(f"{program:20} {ranks:5} {faults:6}  {printed.strip()}, {time.monotonic() - began:.0f} s", flush=True)
            if not well:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
