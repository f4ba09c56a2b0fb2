"""Runs SINGA's example scripts on distopt, one after the other, and prints a table of what came of each.

The scripts are those of the checkout with their imports renamed and the few edits of runs.py. They run with NumPy 2.3,
because they print arrays of one element with '%f', which later versions refuse. The exit code is 0 if and only if no
run fails: each ends with exit code 0, all its ranks train, its losses are finite and as many as expected, and the ranks
end with equal parameters, to the bit, wherever the option promises it; or it ends with the error that runs.py names.
"""

import argparse
import itertools
import json
import math
import os
import platform
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from .checkout import environment, find_mpiexec, last_line, packages, rename_imports, run_within, stop_unless
from .runs import EDITS, GROUPS, Run

ADDED = Path(__file__).parent / "added"
NUMPY = "2.3"
RUN_SECONDS = 300.0
LOSS = re.compile(r"training loss = +([-+.\w]+)", re.IGNORECASE)
ACCURACY = re.compile(r"Evaluation accuracy = ([-+.\w]+)")


@dataclass
class Result:
    """A run's outcome."""

    run: Run
    trouble: str  # empty if all is well
    exit_code: int | None  # None: it took too long
    losses: list[float]
    accuracies: list[float]
    seconds: float
    digests: list[str]  # of the parameters of each process that trained

    @property
    def row(self) -> str:
        cells = [
            f"`{self.command}`",
            "time limit" if self.exit_code is None else str(self.exit_code),
            f"{self.losses[0]:.4g}" if self.losses else "-",
            f"{self.losses[-1]:.4g}" if self.losses else "-",
            f"{self.accuracies[-1]:.3f}" if self.accuracies else "-",
            self.equal,
            f"{self.seconds:.1f}",
            self.verdict,
        ]
        return f"| {' | '.join(cells)} |"

    @property
    def command(self) -> str:
        return self.run.label.replace("{added}/", "").replace("{data}", "DATA")

    @property
    def equal(self) -> str:
        """Whether the ranks ended with equal parameters."""
        if self.run.ranks == 1 or not self.digests:
            return "-"
        return "yes" if len(set(self.digests)) == 1 else "no" if self.run.equal else "not promised"

    @property
    def verdict(self) -> str:
        if self.trouble:
            return f"FAILED: {self.trouble}"
        if self.run.breaks:
            return f"ends by a fault of the script: {self.run.breaks}"
        return "well" if self.run.trains else "well; the script never calls its optimizer"


HEADER = """| command | exit code | first loss | last loss | accuracy | ranks equal | seconds | result |
| --- | --- | --- | --- | --- | --- | --- | --- |"""
COUNTS = """| below `examples` | runs | equal bits | end by a fault of the script | fail |
| --- | --- | --- | --- | --- |"""
FAULTS = """| below `examples` | command | its own fault |
| --- | --- | --- |"""


def prepare(checkout: Path, folder: Path, variables: dict[str, str]) -> None:
    """Copy the scripts, rename their imports, apply the edits, and write the data."""
    rename_imports(checkout / "examples", folder / "examples")
    for edit in EDITS:
        paths = list((folder / "examples").glob(edit.files))
        stop_unless(paths, f"the checkout has no file examples/{edit.files}")
        for path in paths:
            text = path.read_text()
            stop_unless(edit.old in text, f"{path.name} does not contain {edit.old!r}: adapt runs.py to this checkout")
            path.write_text(text.replace(edit.old, edit.new.format(data=folder / "data")))
    code, _, errors = run_within(
        RUN_SECONDS, [sys.executable, "-m", "instruments.singa.data", "sizes"], folder, variables
    )
    stop_unless(code == 0, last_line(errors))


def execute(run: Run, folder: Path, variables: dict[str, str]) -> Result:
    """Run one command within its limit of time; nothing that it started outlives it."""
    link = folder / "data"
    link.unlink(missing_ok=True)
    link.symlink_to(folder / "sizes" / run.data)
    where = folder / "examples" / run.folder
    if not run.resumes:
        (where / "checkpoint.zip").unlink(missing_ok=True)
    prefix = [find_mpiexec(), "-n", str(run.mpi_ranks)] if run.mpi_ranks else []
    command = [*prefix, sys.executable, *run.command.format(added=ADDED, data=link).split()]
    with tempfile.TemporaryDirectory() as records:
        start = time.perf_counter()
        code, output, errors = run_within(RUN_SECONDS, command, where, {**variables, "SINGA_RECORDS": records})
        seconds = time.perf_counter() - start
        found = [json.loads(path.read_text()) for path in Path(records).iterdir()]
    losses = [float(number) for number in LOSS.findall(output)]
    accuracies = [float(number) for number in ACCURACY.findall(output)]
    trouble = find_trouble(run, code, losses, accuracies, found, errors)
    seen = [sum(each) / len(found) for each in zip(*(record["losses"] for record in found), strict=False)]
    digests = [record["digest"] for record in found]
    return Result(run, trouble, code, losses or seen, accuracies, seconds, digests)


def find_trouble(run: Run, code: int | None, losses, accuracies, records, errors: str) -> str:
    """The first thing that is not as it must be, or nothing."""
    if code is None:
        return f"stopped after {RUN_SECONDS:.0f} s"
    if code != 0 or "Traceback" in errors:  # multiprocessing's parent ends with 0 whatever its children do
        error = last_line(errors)
        return "" if run.breaks and error.endswith(run.breaks) else error[:160].replace("|", "\\|")
    if run.breaks:
        return f"the script no longer ends with the error ... {run.breaks}"
    if len(records) != run.ranks:
        return f"{len(records)} of {run.ranks} processes trained"
    counts = f"{len(losses)} losses and {len(accuracies)} accuracies"
    if (len(losses), len(accuracies)) != (run.losses, run.accuracies):
        return f"{counts} were printed, expected {run.losses} and {run.accuracies}"
    seen = [record["losses"] for record in records]
    if not all(map(math.isfinite, itertools.chain(losses, *seen))):
        return "a loss is not finite"
    if any(bool(s) != run.trains for s in seen):
        return "the optimizer was called" if not run.trains else "the optimizer was never called"
    if run.equal and len({record["digest"] for record in records}) > 1:
        return "the parameters of the ranks differ"
    return ""


def main() -> None:
    """Command line: instruments/singa/scripts."""
    parser = argparse.ArgumentParser(prog="scripts", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder of a checkout of github.com/apache/singa")
    parser.add_argument(
        "--only", metavar="GROUP", nargs="+", choices=GROUPS, default=list(GROUPS), help=", ".join(GROUPS)
    )
    parser.add_argument("--match", metavar="WORD", default="", help="only commands that contain WORD")
    parser.add_argument("--output", type=Path, help="also write the table to this Markdown file")
    args = parser.parse_args()
    numpy = packages(NUMPY)
    results: list[Result] = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="singa-") as scratch:
        folder = Path(scratch)
        prepare(args.checkout, folder, environment(numpy))
        for group in args.only:
            runs = [run for run in GROUPS[group]() if args.match in run.label]
            for i, run in enumerate(runs):
                if i == 0 or run.folder != runs[i - 1].folder:
                    print(f"\nIn `examples/{run.folder}`:\n\n{HEADER}")
                path = environment(ADDED, numpy, folder / "examples" / run.folder.split("/")[0])
                results.append(execute(run, folder, path))
                print(results[-1].row, flush=True)
    minutes = (time.perf_counter() - start) / 60
    wrong = sum(bool(result.trouble) for result in results)
    print(f"\n{len(results)} runs in {minutes:.0f} minutes, {wrong} failed.")
    if args.output:
        args.output.write_text(heading() + summary(results, minutes))
    sys.exit(wrong > 0)


def summary(results: list[Result], minutes: float) -> str:
    """Two tables: counts for each folder, and the scripts that end by a fault of their own."""
    rows = []
    for folder in dict.fromkeys(result.run.folder for result in results):
        own = [result for result in results if result.run.folder == folder]
        equal = [result.equal for result in own if result.equal != "-"]
        broken = sum(bool(result.run.breaks) and not result.trouble for result in own)
        failed = sum(bool(result.trouble) for result in own)
        cells = (len(own), f"{equal.count('yes')} of {len(equal)}" if equal else "", broken or "", failed)
        rows.append(f"| `{folder}` | {' | '.join(map(str, cells))} |")
    faults = [
        f"| `{r.run.folder}` | `{r.command}` | {r.run.breaks} |" for r in results if r.run.breaks and not r.trouble
    ]
    return "\n".join([COUNTS, *rows, "", FAULTS, *faults, "", f"{len(results)} runs in {minutes:.0f} minutes.", ""])


def heading() -> str:
    return f"""# SINGA's example scripts on distopt

Counts by `instruments/singa/scripts CHECKOUT --output docs/results/singa.md`, on {platform.machine()} with
{os.cpu_count()} cores, Python {platform.python_version()} and NumPy {NUMPY}. The command prints a row for each
run: losses, accuracy, equal bits, seconds. [Coming from Apache SINGA](../guide/singa.md) says how the scripts are
changed.

- **Data.** MNIST: 2,560 real digits, and 640 for evaluation. CIFAR-10 and CIFAR-100 are replaced by such digits in ten
  colours, of 32 x 32 pixels. Networks that take 224 and more pixels get 10 images in batches of 2: their
  accuracies mean nothing, and losses rise where a learning rate for larger batches is a constant in the script.
- **A run fails** unless all ranks train, with the expected number of losses, all finite.
- **Equal bits** counts the runs of several ranks whose parameters end with the same bits on all ranks. A partial update
  promises this only where all parameters lie in one partition.

"""
