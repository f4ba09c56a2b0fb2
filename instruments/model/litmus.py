"""Runs GenMC over genmc/*.c: every execution that a memory model allows. As a script, with `genmc` on the PATH.

Each program must be well under RC11 (the orders of C++) and under IMM (what processors such as ARM's may do), and wrong
as soon as one of its orders is taken away: a release or an acquire made relaxed, a fence left out, or what an #ifdef of
the program names.
"""

import re
import shutil
import subprocess
import time
from pathlib import Path

PROGRAMS = Path(__file__).parent / "genmc"
ORDERS = re.compile(r"PUBLISHED|SEEN|\bpublish\w*\(|\b(await|fence)\(")
NEEDLESS = "// needs no order"  # a line where the code has one all the same


def weaker(program: Path) -> list[str]:
    """What the preprocessor is told, for each way to take one order away."""
    text = program.read_text()
    lines = [
        f"RELAXED={number}"
        for number, line in enumerate(text.splitlines(), 1)
        if ORDERS.search(line.partition("//")[0]) and NEEDLESS not in line
    ]
    return lines + list(dict.fromkeys(re.findall(r"^#ifn?def (\w+)", text, re.MULTILINE)))


def run(program: Path, memory: str, define: str = "") -> tuple[bool, str]:
    """Whether all executions are well, and their number."""
    defines = [f"-D{define}"] if define else []
    command = ["genmc", f"--{memory}", "--disable-estimation", "--", *defines, str(program)]
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
    began, failed = time.monotonic(), False
    for program in sorted(PROGRAMS.glob("*.c")):
        for memory in ("rc11", "imm"):
            well, executions = run(program, memory)
            orders = weaker(program)
            missed = [define for define in orders if run(program, memory, define)[0]]
            print(
                f"{program.name:12} {memory:5} {executions:>6} executions, {'no error' if well else 'WRONG'}; "
                f"wrong without {len(orders) - len(missed)} of {len(orders)} orders",
                *missed,
                flush=True,
            )
            # A processor may keep an order by a dependency, which C++ does not.
            failed |= not well or (missed != [] if memory == "rc11" else missed == orders)
    print(f"{time.monotonic() - began:.0f} s")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
