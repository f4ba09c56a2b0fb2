#!/usr/bin/env python3
"""Everything a GPU can show in ten minutes, or what can be checked without one: `make first-gpu`.

    python instruments/gpu/first_gpu.py       in a checkout where distopt is installed

Every part is a process of its own with a time limit, so that one which hangs or crashes does not keep the others from
running. After each, OUT/first-gpu.md has what is known so far, with the end of the output of what did not pass, and
OUT/output.txt all output. The exit code is 0 if every part passed, 1 if one failed, 77 if none failed but some were not
run, as without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN, FAILED, SKIPPED = "not run", 1, 77
NO_TESTS = 5  # pytest's exit code where a whole file is skipped
MINUTES, MINUTES_WITHOUT_GPU = 9.0, 4.7  # a machine may be lent for ten, and packages are to be installed
MARK = "DISTOPT_FIRST_GPU_PART"
SHOWN_LINES = 50  # of the output of a part that did not pass
ABORT_SECONDS = 5.0  # at most twice for a part that is stopped, until it is left behind
PROBE_SECONDS = 40.0  # a sanitizer takes some to start
STOPPED = "-- stopped --"  # in the output of a part: what follows is where it was


@dataclass(frozen=True)
class Part:
    """A command of Python's, and how long it may take."""

    name: str
    seconds: float
    arguments: tuple[str, ...]
    before: tuple[str, ...] = ()  # a command that runs Python, such as compute-sanitizer
    alone: bool = True  # whether it measures, so that nothing may run beside it
    probe: tuple[str, ...] = ()  # a command that fails where a machine refuses the one before; else `arguments` run


@dataclass
class Row:
    """How a part ended."""

    name: str
    result: str = NOT_RUN
    seconds: float = 0.0
    says: str = ""
    table: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)


def checks(name: str) -> tuple[str, ...]:
    return ("-m", "instruments.gpu.first_parts", name)


def tests(*names: str) -> tuple[str, ...]:
    """Verbose, so that the last line of one that hangs names it."""
    return ("-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", *names)


def gpu_tests(file: str, seconds: float, *more: str, name: str = "") -> Part:
    return Part(name or f"tests of {file}", seconds, tests(f"tests/gpu/test_{file}.py", *more), alone=False)


def measures(name: str, seconds: float, only: str, *more: str) -> Part:
    return Part(name, seconds, ("-m", "benchmarks", "gpu", "--only", only, *more))


def steps(name: str, seconds: float, only: str, peers: str) -> Part:
    return measures(f"{name} step beside PyTorch, {peers}", seconds, only, "--peers", peers)


def codecs_of_torch(front: str, chosen: str) -> Part:
    return gpu_tests("torch_codecs", 90, "-k", chosen, name=f"PyTorch's codecs: {front}")


def kernel_times(elements: int) -> Part:
    return measures(f"kernels, {elements:,} elements", 60, "kernels", "--elements", str(elements))


def sanitized(tool: str) -> Part:
    command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no")
    return Part(f"every kernel under {tool}", 120, checks("kernels"), command, alone=False, probe=checks("probe"))


# Versions first, as all else may fail for their sake. In the first three minutes come the facts that decide: whether
# kernels and products are right, and how long a step takes. Then PyTorch's codecs and NCCL, the other tests, the tables
# of kernels, and last the parts that take long or that a machine may refuse. Tests run four at a time.
TOGETHER = 4
FRONTS = ("hook", "DistOpt", "DiLoCo")
VERSIONS = Part("versions", 60, ("-m", "distopt", "doctor"))
GPU = Part("GPU", 60, checks("gpu"))
ON_GPU = (
    gpu_tests("kernels", 60),
    Part("products", 60, tests("tests/gpu/test_ops.py", "-k", "products"), alone=False),
    steps("ResNet-50", 80, "resnet", "eager"),
    steps("CNN", 40, "cnn", "eager"),
    Part("NCCL, two ranks on one GPU", 120, tests("tests/gpu/test_nccl.py", "-k", "two"), alone=False),
    *(codecs_of_torch(front, f"{front} and not host") for front in FRONTS),
    Part("CUDA graphs", 180, tests("tests/gpu/test_training.py", "-k", "replays"), alone=False),
    *(codecs_of_torch(f"{front} via the host", f"{front} and host") for front in FRONTS),
    gpu_tests("mnist", 150, "-s"),
    gpu_tests("convolution", 120),
    gpu_tests("codec_kernels", 90),
    gpu_tests("ops", 120),
    gpu_tests("training", 120, "-k", "not replays"),
    Part("NCCL, one rank", 90, tests("tests/gpu/test_nccl.py", "-k", "not two and not via"), alone=False),
    Part("collectives via the host", 120, tests("tests/gpu/test_nccl.py", "-k", "via"), alone=False),
    gpu_tests("tensor", 120),
    gpu_tests("staging", 30),
    Part("lost and stalled peers", 120, tests("tests/gpu/test_peers.py")),
    kernel_times(25_600_000),
    measures("top-K beside others", 60, "select"),
    *map(kernel_times, (100_000_000, 2_000_000, 431_080)),
    measures("ceilings", 60, "ceilings"),
    steps("CNN", 90, "cnn", "compiled"),
    sanitized("memcheck"),
    sanitized("racecheck"),
    steps("ResNet-50", 300, "resnet", "compiled"),
)
EMULATED = (
    "tests/unit/test_ops_gpu.py",
    "tests/unit/test_nccl_setup.py",
    "tests/unit/test_cupy_names.py",
    "tests/conformance/test_gpus_refused.py",
)
WITHOUT_GPU = (
    Part("every kernel compiles, without spills", 150, checks("compile")),
    Part("tests on the emulated GPU", 150, tests("--part", "quick", *EMULATED)),
)


def _which(tool: str) -> str | None:
    return shutil.which(tool) or shutil.which(tool, path=f"/usr/local/cuda/bin:{Path(sys.executable).parent}")


def end_all(mark: str, by: signal.Signals) -> None:
    """Signal the processes with this in their environment, which what they start inherits, in other sessions, too."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), by)


def lines_of(log: Path) -> list[str]:
    return [line for line in log.read_text(errors="replace").splitlines() if line.strip()]


def run(command: Sequence[str], seconds: float, log: Path, environment: Mapping[str, str]) -> int | None:
    """The exit code of a command, which `log` gets the output of; None if it was stopped after `seconds`."""
    code, mark = None, f"{MARK}={log}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "PYTHONFAULTHANDLER": "1", MARK: str(log)},
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
            if code is None:
                output.write(f"\n{STOPPED}\n".encode())
                output.flush()
                end_all(mark, signal.SIGABRT)  # Python then writes where it was
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ABORT_SECONDS)
        finally:
            end_all(mark, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ABORT_SECONDS)  # one that waits in a driver cannot be killed
    return code


def run_part(part: Part, seconds: float, log: Path, environment: Mapping[str, str]) -> Row:
    """Run `part`, and end all that it has started when it has ended or `seconds` are over."""
    found = [_which(tool) for tool in part.before[:1]]
    if found == [None]:
        return Row(part.name, says=f"there is no {part.before[0]}")
    began, command = time.monotonic(), [*found, *part.before[1:], sys.executable]
    if part.probe:
        code = run([*command, *part.probe], min(seconds, PROBE_SECONDS), log, environment)
        if code != 0:
            last = next(reversed(lines_of(log)), "no output")[:160]
            says = f"this machine refuses {part.before[0]}: {last if code is not None else 'it hangs'}"
            return Row(part.name, seconds=time.monotonic() - began, says=says)
        seconds -= time.monotonic() - began
    code = run([*command, *part.arguments], seconds, log, environment)
    everything = lines_of(log)
    lines = everything[: everything.index(STOPPED)] if STOPPED in everything else everything
    row = Row(part.name, seconds=time.monotonic() - began)
    last = next((line.strip(" =") for line in reversed(lines) if not line.startswith("| ")), "")[:160]
    is_pytest = part.arguments[:2] == ("-m", "pytest")
    skipped = code == SKIPPED or (is_pytest and (code == NO_TESTS or (code == 0 and " passed" not in last)))
    if code is None:
        row.result, row.says = f"stopped after {seconds:.0f} s", last
    elif code == 0 or skipped:
        row.result, row.says = NOT_RUN if skipped else "passed", last
    else:
        signalled = f", {signal.Signals(-code).name}" if code < 0 else ""
        row.result, row.says = "failed" if code > 0 else "crashed", f"exit code {code}{signalled}: {last}"
    row.table = [line for line in lines if line.startswith("| ")]
    if row.result not in {"passed", NOT_RUN}:
        row.end = [line for line in everything if line != STOPPED][-SHOWN_LINES:]
    return row


def run_parts(parts: Sequence[Part], out: Path, minutes: float, environment: Mapping[str, str], head: str) -> list[Row]:
    """Run the parts within `minutes`, also if one hangs at the end, and write after each of them what is known."""
    end = time.monotonic() + 60 * minutes - 2 * ABORT_SECONDS
    rows: list[Row] = [Row(part.name, says="its turn has not come") for part in parts]
    lock = Lock()

    def run_one(number: int) -> None:
        part, left = parts[number], end - time.monotonic()
        row, log = Row(part.name, says=f"{minutes:g} minutes are over"), Path(logs, f"{number}.txt")
        if left > 1:
            row = run_part(part, min(part.seconds, left), log, environment)
        with lock:
            rows[number] = row
            print(f"{row.result:22} {row.seconds:6.1f} s  {row.name}: {row.says}", flush=True)
            # A machine may give back few files.
            with (out / "output.txt").open("a") as output:
                text = log.read_text(errors="replace") if log.exists() else ""
                output.write(f"== {row.name}: {row.result}\n{text}\n")
            write(out, rows, head)

    (out / "output.txt").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as logs:
        for alone, numbers in groupby(range(len(parts)), lambda number: parts[number].alone):
            with ThreadPoolExecutor(1 if alone else TOGETHER) as pool:
                list(pool.map(run_one, numbers))  # raises what was raised
    return rows


def write(out: Path, rows: Sequence[Row], head: str) -> None:
    """Replace the file, so that whatever ends this process leaves a whole one."""
    lines = [head, "", "| part | result | seconds | says |", "| --- | --- | --- | --- |"]
    clean = [row.says.replace("|", "/") for row in rows]
    lines += [
        f"| {row.name} | {row.result} | {row.seconds:.1f} | {says} |" for row, says in zip(rows, clean, strict=True)
    ]
    for row in rows:
        if row.table:
            lines += ["", f"{row.name}:", "", *row.table]
    for row in rows:
        if row.end:
            lines += ["", f"{row.name}, the end of its output:", "", "```", *row.end, "```"]
    new = out / "first-gpu.md.new"
    new.write_text("\n".join(lines) + "\n")
    new.replace(out / "first-gpu.md")


def exit_code(rows: Sequence[Row]) -> int:
    results = {row.result for row in rows}
    if results - {"passed", NOT_RUN}:
        return FAILED
    return SKIPPED if NOT_RUN in results else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/first-gpu"), help="folder of the results (%(default)s)")
    parser.add_argument("--minutes", type=float, help=f"when to stop ({MINUTES:g}; no GPU: {MINUTES_WITHOUT_GPU:g})")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="parts whose names have one of these words")
    options = parser.parse_args(argv)
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    added = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "MPLBACKEND": "agg", "PYTHONPATH": added}
    os.chdir(ROOT)
    # Tests on the emulated GPU must not meet a wish for a real one, or the reverse.
    environment.pop("DISTOPT_DEVICE", None)
    with tempfile.NamedTemporaryFile() as log:
        asked = run_part(GPU, GPU.seconds, Path(log.name), environment)
    has_gpu = asked.result != NOT_RUN  # an answer that hangs or crashes rules nothing out
    print(asked.says, flush=True)
    # Without the sources, as `pack.py` wants it, only a GPU is left to try.
    parts = (VERSIONS, *(ON_GPU if has_gpu else WITHOUT_GPU if (ROOT / "distopt").exists() else ()))
    if options.only:
        parts = tuple(part for part in parts if any(word in part.name for word in options.only))
    head = f"{asked.says}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d %H:%M')}."
    minutes = options.minutes or (MINUTES if has_gpu else MINUTES_WITHOUT_GPU)
    rows = run_parts(parts, out, minutes - (time.monotonic() - began) / 60, environment, head)
    counts = {result: sum(row.result == result for row in rows) for result in sorted({row.result for row in rows})}
    print(f"{', '.join(f'{count} {result}' for result, count in counts.items())}; see {out}/first-gpu.md")
    return exit_code(rows) or (0 if has_gpu else SKIPPED)


if __name__ == "__main__":
    sys.exit(main())
