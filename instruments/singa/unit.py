"""Runs SINGA's unit tests on distopt, and compares the failures with the exceptions in exceptions.py.

The cases are read from the source first, so that one that crashes, hangs or cannot be imported counts as a failure.
The exit code is 0 if and only if every failure is listed, no listed case passes, and the list keeps its promise: at
most a quarter of the cases of test_tensor.py and test_operation.py that need no GPU, and none of the other files.
"""

import argparse
import ast
import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .checkout import environment, find_mpiexec, last_line, packages, rename_imports, run_within, stop_unless
from .exceptions import EXCEPTIONS, EXCEPTIONS_OF_NUMPY_2_4

HERE = Path(__file__).parent
CASE_SECONDS = 60.0  # one case
FILE_SECONDS = 600.0  # all cases of a file; reached only if a process hangs outside of a case

# File, number of ranks, or None without MPI.
JOBS = (
    ("test_dist.py", 1),
    ("test_dist.py", 2),
    ("test_dist.py", 3),
    ("test_opt.py", None),
    ("test_model.py", None),
    ("test_initializer.py", None),
    ("test_tensor.py", None),
    ("test_operation.py", None),
)
ALLOWED_SHARE = {"test_tensor.py": 0.25, "test_operation.py": 0.25}  # of the cases that need no GPU; else none


@dataclass
class Report:
    """Outcomes of the cases of one file."""

    file: str
    ranks: int | None
    cases: list[str]  # Class.method
    passed: list[str] = field(default_factory=list)  # methods, as those below
    skipped: list[str] = field(default_factory=list)  # for want of a GPU
    failed: dict[str, str] = field(default_factory=dict)  # with the reason


def find_cases(path: Path) -> list[str]:
    """The test methods of a file, in the order in which unittest runs them."""
    cases = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names = {method.name for method in node.body if isinstance(method, ast.FunctionDef)}
            cases += [f"{node.name}.{name}" for name in sorted(names) if name.startswith("test")]
    twice = [method for method, count in Counter(map(method_of, cases)).items() if count > 1]
    stop_unless(not twice, f"{path.name} has several cases of one name: {', '.join(twice)}")
    return cases


def method_of(case: str) -> str:
    return case.split(".")[1]


def run_file(folder: Path, file: str, ranks: int | None, variables: dict[str, str]) -> Report:
    """Run all cases of a file; resume after a case that ends the process."""
    report = Report(file, ranks, find_cases(folder / file))
    remaining = report.cases
    while remaining:
        outcomes, trouble = run_once(folder, file, ranks, remaining, variables)
        for case, (outcome, reason) in (outcomes or dict.fromkeys(remaining, ("fail", trouble))).items():
            if outcome == "pass":
                report.passed.append(method_of(case))
            elif outcome == "skip" and "CUDA" in reason:
                report.skipped.append(method_of(case))
            else:
                report.failed[method_of(case)] = reason
        remaining = [case for case in remaining if case not in outcomes] if outcomes else []
    return report


def run_once(
    folder: Path, file: str, ranks: int | None, cases: list[str], variables: dict[str, str]
) -> tuple[dict[str, tuple[str, str]], str]:
    """Run cases in one job; the outcomes by case, and what to say of those that have none.

    A case passes if it passes on every rank, and fails if it was started and not finished.
    """
    with tempfile.TemporaryDirectory() as records:
        worker = [sys.executable, str(HERE / "cases.py"), Path(file).stem, records, str(CASE_SECONDS), *cases]
        command = worker if ranks is None else [find_mpiexec(), "-n", str(ranks), *worker]
        code, _, errors = run_within(FILE_SECONDS, command, folder, variables)
        by_rank = [read_record(path) for path in Path(records).iterdir()]
    trouble = f"ended the process with exit code {code}: {last_line(errors)}"
    if code is None or "Timeout (" in errors:  # the latter from faulthandler in cases.py
        trouble = f"took longer than {FILE_SECONDS if code is None else CASE_SECONDS:.0f} s"
    outcomes = {}
    for case in cases:
        found = [record[case] for record in by_rank if case in record]
        if found:
            found += [("started", "")] * ((ranks or 1) - len(found))
            worst = min(found, key=lambda outcome: ("fail", "started", "skip", "pass").index(outcome[0]))
            outcomes[case] = ("fail", trouble) if worst[0] == "started" else worst
    return outcomes, trouble


def read_record(path: Path) -> dict[str, tuple[str, str]]:
    """The last outcome of each case in the file of one process."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["case"]: (line["outcome"], line["reason"]) for line in lines}


def listed_cases(numpy: str) -> dict[str, dict[str, str]]:
    """The reason of each exception with that version of NumPy, by file and case."""
    listed: dict[str, dict[str, str]] = {}
    old = tuple(map(int, numpy.split(".")[:2])) < (2, 4)
    for exceptions in (EXCEPTIONS,) if old else (EXCEPTIONS, EXCEPTIONS_OF_NUMPY_2_4):
        for file, reasons in exceptions.items():
            for reason, cases in reasons.items():
                listed.setdefault(file, {}).update(dict.fromkeys(cases.split(), reason))
    return listed


def faults_of(reports: list[Report], listed: dict[str, dict[str, str]]) -> list[str]:
    """All reasons for an exit code other than 0."""
    faults = []
    for report in reports:
        own = listed.get(report.file, {})
        unlisted = report.failed.keys() - own
        if unlisted:
            faults.append(f"{label(report)}: {len(unlisted)} cases fail that are not listed")
        faults += [f"{label(report)}: {case} passes; take it from the list" for case in report.passed if case in own]
        unknown = own.keys() - set(map(method_of, report.cases))
        faults += [f"{label(report)}: {case} is listed, but there is no such case" for case in unknown]
        testable = len(report.cases) - len(report.skipped)
        allowed = int(testable * ALLOWED_SHARE.get(report.file, 0))
        if len(own) > allowed:
            faults.append(f"{label(report)}: {len(own)} cases are listed; {allowed} of {testable} may be")
    return faults


def failures(report: Report, listed: dict[str, str]) -> list[str]:
    """One line per reason: the cases that fail for it, and whether they are listed."""
    groups: dict[tuple[str, str], list[str]] = {}
    for case, reason in report.failed.items():
        mark = f"listed: {listed[case]}" if case in listed else "NOT LISTED"
        groups.setdefault((reason[:200], mark), []).append(case)
    return [f"{label(report)} {', '.join(cases)}: {reason} [{mark}]" for (reason, mark), cases in groups.items()]


def label(report: Report) -> str:
    return report.file + ("" if report.ranks is None else f" ({report.ranks} rank{'s' * (report.ranks > 1)})")


def table(reports: list[Report], listed: dict[str, dict[str, str]]) -> str:
    """Markdown: what passes, fails and is skipped, per file."""
    lines = [
        "| file | cases | pass | fail | of these listed | skipped, need a GPU |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for report in reports:
        own = listed.get(report.file, {})
        lines.append(
            f"| {label(report)} | {len(report.cases)} | {len(report.passed)} | {len(report.failed)} "
            f"| {len(own.keys() & report.failed.keys())} | {len(report.skipped)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line: instruments/singa/run."""
    parser = argparse.ArgumentParser(prog="run", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder of a checkout of github.com/apache/singa")
    parser.add_argument(
        "--numpy", metavar="VERSION", help="run on this version, for example 2.3 (default: the installed one)"
    )
    parser.add_argument("--only", metavar="WORD", default="", help="only files whose name contains WORD")
    args = parser.parse_args()
    variables = environment(*([packages(args.numpy)] if args.numpy else []))
    listed = listed_cases(args.numpy or np.__version__)
    with tempfile.TemporaryDirectory(prefix="singa-") as scratch:
        folder = Path(scratch) / "python"
        rename_imports(args.checkout / "test" / "python", folder)
        reports = [run_file(folder, file, ranks, variables) for file, ranks in JOBS if args.only in file]
    for report in reports:
        for line in failures(report, listed.get(report.file, {})):
            print(line)
    faults = faults_of(reports, listed)
    print(f"\n{table(reports, listed)}\n")
    print("\n".join(faults or ["All failures are listed, and all that is listed fails."]))
    sys.exit(bool(faults))
