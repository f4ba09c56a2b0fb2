"""All that must hold on a real Slurm, and the tables of docs/results/slurm.md."""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from .cluster import Cluster, SlurmUnavailableError, slurm
from .signals import (
    CASES,
    PYTORCH_CASES,
    PYTORCH_WHOLE_RUN,
    TEMPLATE_CASES,
    WHOLE_RUN,
    Case,
    Ending,
    try_case,
    undisturbed,
    undisturbed_ddp,
    undisturbed_template,
)
from .ways import (
    PYTORCH_WAYS,
    ROOT,
    TEMPLATE_WAYS,
    WAYS,
    Outcome,
    Way,
    digits_of,
    least_wire_bytes,
    small_mnist,
    try_way,
)

RESULTS = ROOT / "docs" / "results" / "slurm.md"
LEAST_CORRECT = 9897  # of 10,000, after 14 epochs
MOST_OFF_WIRE_BYTES = 1 << 20  # of one node that trains alone: Slurm's own messages
DOUBT = "**does not hold**"
_INTRODUCTION = """\
# Results on a real Slurm

Written by `make slurm` ({version}, {date}). One machine plays the front end and two nodes: network namespaces with
host names of their own, joined by a bridge. mpiexec and `srun --mpi=pmi2` use MPICH with `UCX_TLS=tcp,self`, so that
what the nodes exchange goes over the bridge; all other commands use UCX. See [Slurm](../guide/slurm.md).
"""


@dataclass
class Table:
    """Rows, printed as they come, and whether all of them hold."""

    title: str
    columns: tuple[str, ...]
    rows: list[str] = field(default_factory=list)
    holds: bool = True

    def __post_init__(self) -> None:
        print(f"\n{self.title}\n\n{self._head()}", flush=True)

    def _head(self) -> str:
        return f"| {' | '.join(self.columns)} |\n|{' --- |' * len(self.columns)}"

    def add(self, *cells: object, holds: bool, output: str) -> None:
        self.rows.append(f"| {' | '.join(map(str, cells))} |")
        print(self.rows[-1], flush=True)
        if not holds:
            self.holds = False
            print(output, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        return "\n".join([self.title, "", self._head(), *self.rows])


@dataclass
class Ways(Table):
    """Ways to start ranks. The page has a row for each result.

    Attributes:
        groups: names of ways, and bytes on the wire as a share of what must be, by result and nodes.
    """

    groups: dict[tuple[str, int], list[tuple[str, str]]] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = []
        for (result, nodes), found in self.groups.items():
            shares = sorted({share for _, share in found})
            span = " to ".join(dict.fromkeys([shares[0], shares[-1]]))
            rows.append(f"| {'; '.join(name for name, _ in found)} | {nodes} | {result} | {span} |")
        head = "| started by | nodes | result | of what must be |\n| --- | --- | --- | --- |"
        return "\n".join([self.title, "", head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a part, for continuous integration")
    parser.add_argument("--template", action="store_true", help="examples/template alone, all of it")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster is stopped on the way out
    try:
        with slurm() as cluster:
            holds = run_template(cluster) if args.template else run(cluster, args.quick)
    except SlurmUnavailableError as error:
        print(f"tests of Slurm are skipped: {error}")
        return
    sys.exit(not holds)


def run(cluster: Cluster, quick: bool) -> bool:
    """Make all tables; whether everything holds."""
    source = os.environ.get("DISTOPT_DATA_DIR")
    data = small_mnist(source, cluster.here / "data")
    sizes = (2,) if quick else (2, 4)
    tables = [ways(cluster, data, ranks, quick) for ranks in sizes]
    if find_spec("torch") is not None:
        tables += [ways(cluster, data, ranks, quick, PYTORCH_WAYS, ", PyTorch's DDP") for ranks in sizes]
        if find_spec("submitit") is not None:
            tables += [template_ways(cluster, data, ranks, quick) for ranks in sizes]
    else:
        print("\nPyTorch's jobs are skipped: it is not installed")
    tables.append(endings(cluster, data, quick))
    if not quick:
        tables += [pytorch_endings(cluster, data), template_endings(cluster, data)]
        tables += [whole_runs(cluster, source), pytorch_whole_runs(cluster, source)]
        version = cluster.run(["sinfo", "--version"]).stdout.strip()
        introduction = _INTRODUCTION.format(version=version, date=time.strftime("%Y-%m-%d"))
        RESULTS.write_text("\n".join([introduction, *(f"{table}\n" for table in tables)]))
    return all(table.holds for table in tables)


def run_template(cluster: Cluster) -> bool:
    """Make the tables of examples/template; whether everything holds."""
    data = small_mnist(os.environ.get("DISTOPT_DATA_DIR"), cluster.here / "data")
    tables = [*(template_ways(cluster, data, ranks, False) for ranks in (2, 4)), template_endings(cluster, data)]
    return all(table.holds for table in tables)


def template_ways(cluster: Cluster, data: Path, ranks: int, quick: bool) -> Table:
    return ways(cluster, data, ranks, quick, TEMPLATE_WAYS, ", examples/template")


def ways(cluster: Cluster, data: Path, ranks: int, quick: bool, of: tuple[Way, ...] = WAYS, what: str = "") -> Ways:
    """Every way gives the same digits, and sends over the wire little more than it must."""
    must = least_wire_bytes(ranks)
    table = Ways(
        f"## {ranks} ranks{what}: the same digits however they are started\n\nAt least {must / 1e6:.1f} MB must leave "
        "each of two nodes: a gradient per step.",
        ("started by", "nodes", "result", "MB on the wire", "of what must be"),
    )
    expected: dict[object, list[str]] = {}
    for way in of:
        if quick and not way.quick:
            continue
        with contextlib.suppress(subprocess.TimeoutExpired):
            outcome = Outcome("no end", 1, 0)
            outcome = try_way(cluster, way, data, ranks)
        digits = digits_of(outcome.output)
        # Two ranks' sums are those of any two. Of four, two nodes add in another order than one, and Gloo in another.
        first = expected.setdefault((way.nodes, way.backend) if ranks > 2 else None, digits)
        ratio = outcome.wire_bytes / must
        on_wire = 1 <= ratio <= way.most_wire if way.nodes > 1 else outcome.wire_bytes < MOST_OFF_WIRE_BYTES
        same = bool(digits) and digits == first
        share = (f"{ratio:.3f}" if way.nodes > 1 else "-") + ("" if on_wire else f" {DOUBT}")
        result = (digits[-1].rpartition(": ")[2] if digits else "") + ("" if same else f" {DOUBT}")
        table.groups.setdefault((result, way.nodes), []).append((way.name, share))
        table.add(
            way.name,
            way.nodes,
            result,
            f"{outcome.wire_bytes / 1e6:.1f}",
            share,
            holds=outcome.code == 0 and same and on_wire,
            output=outcome.output,
        )
    return table


_ENDING_COLUMNS = ("what happens", "state in the end", "queued again", "went on after step", "same digits", "seconds")


def endings(cluster: Cluster, data: Path, quick: bool) -> Table:
    """Jobs that are disturbed in their second epoch."""
    return _endings(
        "## Signals and preemption\n\n2 ranks on two nodes, disturbed in the second of 8 epochs. The seconds are those "
        "until the ranks had left. The digits are all lines of losses and accuracies, those of both runs together.",
        cluster,
        data,
        undisturbed(cluster, data),
        [case for case in CASES if not quick or case.quick],
    )


def pytorch_endings(cluster: Cluster, data: Path) -> Table:
    """Jobs of DDP that are disturbed in their second and their fourth epoch."""
    return _endings(
        "## Signals and preemption, PyTorch's DDP\n\nAs above, but twice, in the second and in the fourth epoch. One "
        "undisturbed job, over distopt, says which digits and parameters there must be.",
        cluster,
        data,
        undisturbed_ddp(cluster, data, 2, "distopt"),
        PYTORCH_CASES,
    )


def template_endings(cluster: Cluster, data: Path) -> Table:
    """Jobs of examples/template that are disturbed in their second and their fourth epoch."""
    return _endings(
        "## Signals, preemption and death, examples/template\n\nAs above, by `-slurm`. A job that is killed repeats "
        "the steps since its last checkpoint, to the same digits. All are compared with those of `-cpus 2`.",
        cluster,
        data,
        undisturbed_template(cluster, data),
        TEMPLATE_CASES,
    )


def _endings(heading: str, cluster: Cluster, data: Path, whole: list[str], cases: Sequence[Case]) -> Table:
    table = Table(heading, _ENDING_COLUMNS)
    for case in cases:
        add_ending(table, case, try_case(cluster, case, data), whole)
    return table


def add_ending(table: Table, case: Case, ending: Ending, whole: list[str]) -> None:
    """Add a row: a job that comes back completes, with the lines of an undisturbed one; another stays away."""
    digits = digits_of(ending.output)
    same = bool(whole) and (list(dict.fromkeys(digits)) if case.killed else digits) == whole
    if case.comes_back:
        came_back = ending.restarts == len(ending.resumed_at) == len(case.disturb)
        holds = same and ending.state == "COMPLETED" and came_back
    else:
        holds = ending.state == "CANCELLED" and ending.restarts == 0
    said = ("yes" if same else DOUBT) if case.comes_back else "-"
    went_on = ", ".join(ending.resumed_at) or "-"
    state = ending.state if holds else f"{ending.state} {DOUBT}"
    seconds = ", ".join(f"{each:.1f}" for each in ending.seconds)
    table.add(case.name, state, ending.restarts, went_on, said, seconds, holds=holds, output=ending.output)


def whole_runs(cluster: Cluster, source: str | None) -> Table:
    """14 epochs of MNIST, undisturbed and preempted."""
    table = Table("## 14 epochs of MNIST, 2 ranks on two nodes", _ENDING_COLUMNS)
    data, began = whole_mnist(source), time.monotonic()
    whole = undisturbed(cluster, data, WHOLE_RUN)
    said, good = correct_in(whole)
    table.add("nothing", said, 0, "-", "-", f"{time.monotonic() - began:.0f}", holds=good, output="\n".join(whole))
    case = CASES[0]
    add_ending(table, case, try_case(cluster, case, data, WHOLE_RUN, r"Train Epoch: 3 \[3\d{4}/"), whole)
    return table


def pytorch_whole_runs(cluster: Cluster, source: str | None) -> Table:
    """14 epochs of MNIST by PyTorch's DDP."""
    title = "## 14 epochs of MNIST, PyTorch's DDP, 2 x 2 ranks on two nodes"
    table = Table(title, ("backend", "correct", "seconds", "parameters"))
    for backend in ("distopt", "gloo"):
        began = time.monotonic()
        lines = undisturbed_ddp(cluster, whole_mnist(source), 4, backend, PYTORCH_WHOLE_RUN)
        said, good = correct_in(lines)
        digest = lines[-1].split()[-1] if lines else DOUBT
        table.add(backend, said, f"{time.monotonic() - began:.0f}", digest, holds=good, output="\n".join(lines))
    return table


def whole_mnist(source: str | None) -> Path:
    return Path(source) if source else Path.home() / ".cache" / "distopt" / "mnist"


def correct_in(lines: list[str]) -> tuple[str, bool]:
    """How many digits were right in the end, and whether these are enough."""
    found = re.findall(r"Accuracy: (\d+)/10000", "\n".join(lines))
    correct = int(found[-1]) if found else 0
    good = correct >= LEAST_CORRECT
    return f"{correct}/10000 {'' if good else DOUBT}".strip(), good
