"""Runs GenMC over genmc/*.c: every execution that a memory model allows. As a script, with `genmc` on the PATH.

Each program must be well under RC11 (the orders of C++) and under IMM (what processors such as ARM's may do), and wrong
as soon as one of its orders is taken away.
"""

import re
import shutil
import subprocess
from pathlib import Path

PROGRAMS = Path(__file__).parent / "genmc"
WEAKER = ["RELAXED_STORE", "RELAXED_LOAD", "NO_WAKE_FENCE", "NO_SLEEP_FENCE"]


def run(program: Path, memory: str, weaker: str | None = None) -> tuple[bool, str]:
    """Whether all executions are well, and their number."""
    define = [f"-D{weaker}"] if weaker else []
    command = ["genmc", f"--{memory}", "--disable-estimation", "--", *define, str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    executions = re.search(r"complete executions explored: (\d+)", ended.stdout)
    if ended.returncode not in (0, 42) or executions is None:  # 42: an error in the program
        raise SystemExit(f"{command}: {ended.stderr or ended.stdout}")
    return ended.returncode == 0, executions[1]


def main() -> None:
    if shutil.which("genmc") is None:
        raise SystemExit(
            "genmc is not installed; build version 0.10 of github.com/MPI-SWS/genmc and put it on the PATH"
        )
    for program in sorted(PROGRAMS.glob("*.c")):
        for memory in ("rc11", "imm"):
            well, executions = run(program, memory)
            print(f"{program.name:12} {memory:5} {executions:>6} executions  {'no error' if well else 'WRONG'}")
            if not well:
                raise SystemExit(1)
            for weaker in WEAKER:
                if weaker not in program.read_text() and weaker.startswith("NO"):
                    continue
                well, _ = run(program, memory, weaker)
                print(f"{program.name:12} {memory:5} {weaker:16}   {'NOTHING FOUND' if well else 'error found'}")
                if well:
                    raise SystemExit(1)


if __name__ == "__main__":
    main()
