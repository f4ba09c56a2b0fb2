"""distopt beside its peers, in one table: sums beside Gloo, MPI and messages of UCX, steps and tokens beside Gloo.

Each row compares distopt with the best that a peer offers, in turns of one run; times are medians of turns, and
a range is that of the turns: Gloo has two speeds, and it tells which of them was met. Rows of steps compare the
time that communication adds. Needs root, iproute2, PyTorch, and MPICH or Open MPI with mpi4py; takes some minutes.

    sudo .venv/bin/python -m benchmarks never-slower
    sudo .venv/bin/python -m benchmarks never-slower --only small,torch-2x1-1KiB --turns 9
    sudo .venv/bin/python -m benchmarks never-slower --only mpi-2x1,ucx-2x2-1KiB --profile

With --profile, tables of where the time is spent follow, in microseconds a call, step or token: for each rank, means of the
half of its batches, steps or tokens whose times are in the middle. Over a process group of distopt they have the events
of its timeline ("wait": for other ranks), and "rest", which is all else; for others, the time of the call and processor time.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from distopt.cli.values import at_least
from distopt.comm.net.ucx import library
from distopt.errors import DistoptError, MissingDependencyError, pip_install

from . import pytorch
from .all_reduce import Row as Measured
from .all_reduce import measure
from .networks.emulation import LINK, near_hosts, two_hosts
from .networks.site import EmulatedSite, NamespaceSite, Site
from .options import names_of
from .output import heading, machine, table, write_json
from .peers.lineup import Candidate, Lineup, distopt_crew, mpi_crew
from .pytorch import DISTOPT, FAKE, GLOO, MODELS, NOTHING, Answers, of_rounds, print_head, print_row

MPI = "MPI"
SAMPLES, WARM_UP = 5, 2  # batches of a sum in each turn
SIZES = {"1KiB": 1 << 10, "64KiB": 64 << 10, "1MiB": 1 << 20, "4MiB": 4 << 20, "16MiB": 16 << 20}
_TRIES = 20  # to reach a server that starts


@dataclass(frozen=True)
class Result:
    """The measurement of a row, in seconds.

    Attributes:
        ours, peer: one number for each turn.
        score: what is compared with `wanted`.
        extra: what else is worth knowing.
        profile: where the time goes, as a table.
    """

    ours: Sequence[float]
    peer: Sequence[float]
    score: float
    extra: str = ""
    profile: str = ""


@dataclass(frozen=True)
class Row:
    """What is measured, by `measure(site, args)`.

    Attributes:
        ranks: on each emulated host; 0: two ranks on this one.
        wanted: as the table says it.
        met: whether a score is as wanted.
        bound: whether mpiexec binds the ranks of a host to a core each. Small sums depend on who shares a core.
        hosts: number of emulated hosts.
    """

    work: str
    ranks: int
    wanted: str
    met: Callable[[float], bool]
    measure: Callable[[Site, argparse.Namespace], Result]
    bound: bool = False
    hosts: int = 2


# -- sums --------------------------------------------------------------------------------------------------------------
def sums(name: str, peer: str, n_bytes: int, site: Site, args: argparse.Namespace, *, in_us: bool = False) -> Result:
    """All-reduces of float32: a turn's time is the median of its batches, a peer's that of its fastest operation."""
    wanted = {"collective": "all_reduce", "dtype": "float32", "w": WARM_UP, "np": site.world_size}
    given = argparse.Namespace(**wanted, n=args.turns * SAMPLES, turns=args.turns)
    count, best = n_bytes // 4, dict[str, Measured]()
    with Lineup() as lineup:
        for each in (name, peer):
            if each in (GLOO, DISTOPT):
                pytorch.fill(lineup, [each], "all_reduce", site, {})
            elif each == MPI:
                lineup.add(each, partial(mpi_crew, "all_reduce", site))
            else:
                lineup.add(each, partial(distopt_crew, "all_reduce", site, each))
        rows = measure(given, lineup, count, count, n_bytes)
        lineup.require_all()
        if wrong := [row.who for row in rows if row.wrong]:
            raise DistoptError(f"{', '.join(wrong)}: results of sums of {n_bytes:,} bytes are wrong")
        for row in rows:
            # distopt's arrays are wire memory where it has any, as gradients are.
            if row.buffers != "ordinary" and (
                row.who not in best or median(_turns(row)) < median(_turns(best[row.who]))
            ):
                best[row.who] = row
        phases = profile(lineup, best, args.turns) if args.profile else ""
    ours, theirs = _turns(best[name]), _turns(best[peer])
    score = median(ours) * 1e6 if in_us else median(theirs) / median(ours)
    return Result(ours, theirs, score, profile=phases)


def beside_messages(n_bytes: int, site: Site, args: argparse.Namespace) -> Result:
    """All-reduces of float32 in PyTorch beside messages of `ucx_perftest`, as often as in its time in one direction."""
    ours, theirs = [], []
    given = argparse.Namespace(collective="all_reduce", dtype="float32", w=WARM_UP, np=2, n=SAMPLES, turns=1)
    with Lineup() as lineup:
        pytorch.fill(lineup, [DISTOPT], "all_reduce", site, {})
        for _ in range(args.turns):
            rows = measure(given, lineup, n_bytes // 4, n_bytes // 4, n_bytes)
            lineup.require_all()
            ours.append(min(median(row.seconds) for row in rows))
            theirs.append(one_way(site, n_bytes))
    return Result(ours, theirs, median(ours) / median(theirs))


def one_way(site: Site, n_bytes: int) -> float:
    """The median time that a message of UCX takes from one host to the other, in seconds, by `ucx_perftest`."""
    folder = Path(library()).parents[1]
    program = folder / "bin" / "ucx_perftest"
    if not program.exists():
        raise MissingDependencyError(f"{program} is missing; {pip_install('hosts')}")
    settings = [f"LD_LIBRARY_PATH={folder / 'lib'}", "UCX_TLS=tcp,self", f"UCX_NET_DEVICES={LINK}"]
    command = ["env", *settings, str(program), "-t", "tag_lat", "-s", str(n_bytes), "-n", "2000", "-w", "200", "-f"]
    address, port = site.meeting()["meeting"].removeprefix("tcp://").split(":")
    with subprocess.Popen(site.by_hand(0, [*command, "-p", port]), stdout=subprocess.DEVNULL) as server:
        try:
            for _ in range(_TRIES):
                time.sleep(0.2)  # until it listens
                client = site.by_hand(1, [*command, "-p", port, address])
                done = subprocess.run(client, capture_output=True, text=True, check=False)
                if done.returncode == 0:
                    return float(done.stdout.split()[-7]) * 1e-6
        finally:
            server.kill()
    raise DistoptError(f"ucx_perftest: {done.stderr.strip()}")


def _turns(row: Measured) -> list[float]:
    return [median(row.seconds[at : at + SAMPLES]) for at in range(0, len(row.seconds), SAMPLES)]


def profile(lineup: Lineup, best: dict[str, Measured], turns: int) -> str:
    """The time that each rank spends in events of the timeline in a call, as a table."""
    answers: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in best}

    def ask(candidate: Candidate, _: int) -> None:
        row = best[candidate.name]
        of_row = {name: getattr(row, name) for name in ("collective", "buffers", "count", "dtype", "calls")}
        request = {**of_row, "capacity": row.count, "warm_up": WARM_UP, "samples": SAMPLES, "profile": True}
        answers[candidate.name].append(candidate.crew.ask(request))

    lineup.take_turns(turns, ask)
    lineup.require_all()
    return phase_table(answers)


def phase_table(answers: Answers) -> str:
    """The table of `profile`, from answers with "spans"."""
    lines = []
    for name, asked in answers.items():
        batches = [batch for ranks in asked for batch in zip(*(rank["spans"] for rank in ranks), strict=True)]
        for batch in batches:
            first = min(span["begin"] for span in batch)
            for span in batch:
                span["begin"] -= first
        for rank, spans in enumerate(zip(*batches, strict=True)):
            seconds = [second for ranks in asked for second in ranks[rank]["seconds"]]
            spans = [{**span, "call": second} for span, second in zip(spans, seconds, strict=True)]
            spans = sorted(spans, key=lambda span: span["call"])[len(spans) // 4 : -(len(spans) // 4) or None]
            names = dict.fromkeys(each for span in spans for each in span)
            middle = {each: mean(span.get(each, 0.0) for span in spans) for each in names}
            begin, cpu, call = (middle.pop(each) for each in ("begin", "cpu", "call"))
            lines.append((f"{name}, rank {rank}", {"begins": begin, **middle, "call": call, "cpu": cpu}, middle))
    phases = list(dict.fromkeys(each for _, _, middle in lines for each in middle if middle[each]))
    columns = ["begins", *phases, "rest", "call", "cpu"]
    cells = []
    for of, spent, middle in lines:
        spent |= {"rest": spent["call"] - sum(middle.values())} if middle else {}
        cells.append([of, *(f"{spent[each] * 1e6:,.1f}" if each in spent else "" for each in columns)])
    return table(["us a call", *columns], cells)


# -- steps and tokens --------------------------------------------------------------------------------------------------
def step(model: str, site: Site, args: argparse.Namespace) -> Result:
    """The time that communication adds to a step of DDP, relative to Gloo's."""
    found = _steps([NOTHING, GLOO, DISTOPT], {"model": model, **MODELS[model][1]}, site, args)
    return _added(found, NOTHING, args)


def fsdp2_step(site: Site, args: argparse.Namespace) -> Result:
    """The time that communication adds to a step of FSDP2, relative to Gloo's."""
    found = _steps([FAKE, GLOO, DISTOPT], {"model": "mlp", "fsdp2": True, **MODELS["mlp"][1]}, site, args)
    return _added(found, FAKE, args)


def tokens(hidden: int, site: Site, args: argparse.Namespace) -> Result:
    """Tokens of tensor-parallel inference; each token has two sums a layer."""
    given = argparse.Namespace(rounds=args.turns, steps=args.steps)
    found = pytorch.tokens_of(hidden, site, given, {"profile": args.profile})
    bare, gloo, ours = (of_rounds(found[name]) for name in (NOTHING, GLOO, DISTOPT))
    speeds = "tokens/s without sums {:.1f}, over Gloo {:.1f}, over distopt {:.1f}; {:.0f} us a sum"
    extra = speeds.format(*(1 / median(each) for each in (bare, gloo, ours)), pytorch.sum_us(found))
    phases = phase_table(found) if args.profile else ""
    return Result(ours, gloo, median(gloo) / median(ours), f"{extra}; {_bits(found)}", phases)


def _steps(names: list[str], options: dict[str, Any], site: Site, args: argparse.Namespace) -> Answers:
    given = argparse.Namespace(rounds=args.turns, steps=args.steps, emulate=None)
    return pytorch.steps_of(names, site, {**options, "profile": args.profile}, given)


def _added(found: Answers, without: str, args: argparse.Namespace) -> Result:
    bare, gloo, ours = (of_rounds(found[name]) for name in (without, GLOO, DISTOPT))
    added = [[one - base for one, base in zip(each, bare, strict=True)] for each in (ours, gloo)]
    extra = f"step without communication {median(bare) * 1e3:.2f} ms; {_bits(found)}"
    phases = phase_table(found) if args.profile else ""
    return Result(*added, median(added[0]) / median(added[1]), extra, phases)


def _bits(found: Answers) -> str:
    return "the same bits" if pytorch.same_bits(found) == "yes" else "OTHER BITS"


# -- the table ---------------------------------------------------------------------------------------------------------
def at_least_as(factor: float) -> dict[str, Any]:
    return {"wanted": f">= {factor:g}", "met": lambda score: score >= factor}


def at_most(limit: float, unit: str = "") -> dict[str, Any]:
    return {"wanted": f"<= {limit:g}{unit}", "met": lambda score: score <= limit}


ROWS = {
    "small": Row(
        "all_reduce of 1 KiB in PyTorch, one host; score in us",
        0,
        **at_most(10, " us"),
        measure=partial(sums, DISTOPT, GLOO, 1 << 10, in_us=True),
    ),
    **{
        f"torch-{hosts}x{ranks}-{size}": Row(
            f"{size} in PyTorch, {hosts} hosts x {ranks}",
            ranks,
            **at_least_as(wanted),
            measure=partial(sums, DISTOPT, GLOO, n_bytes),
            hosts=hosts,
        )
        for hosts, ranks in ((2, 1), (2, 2), (4, 1))
        for (size, n_bytes), wanted in zip(SIZES.items(), (5, 1.5, 0.97, 0.97, 0.97), strict=True)
    },
    **{
        f"ucx-{size}": Row(
            f"{size} in PyTorch, 2 hosts x 1, beside one way of a message of ucx_perftest",
            1,
            **at_most(wanted),
            measure=partial(beside_messages, SIZES[size]),
        )
        for size, wanted in (("1KiB", 5), ("64KiB", 3))
    },
    **{
        f"ucx-2x{ranks}-{size}": Row(
            f"{size} over UCX, 2 hosts x {ranks}, beside MPI",
            ranks,
            **at_least_as(wanted),
            measure=partial(sums, "ucx", MPI, n_bytes),
        )
        for ranks in (1, 2)
        for (size, n_bytes), wanted in zip(SIZES.items(), (0.7, 0.8, 0.95, 0.95, 0.95), strict=True)
    },
    "mpi-2x1": Row("25.6 MB over MPI, 2 x 1", 1, **at_least_as(0.95), measure=partial(sums, "mpi", MPI, 25_600_000)),
    "hierarchical-2x2": Row(
        "1 KiB over MPI, 2 x 2, hierarchical",
        2,
        **at_least_as(0.95),
        measure=partial(sums, "hierarchical", MPI, 1 << 10),
        bound=True,
    ),
    **{
        name: Row(f"added to a DDP step: {MODELS[name][0]}", 0, **at_most(0.15), measure=partial(step, name))
        for name in ("resnet18", "mlp")
    },
    "fsdp2": Row(f"added to an FSDP2 step: {MODELS['mlp'][0]}", 0, **at_most(0.3), measure=fsdp2_step),
    **{
        f"tokens-{hidden}": Row(
            f"a token, tensor-parallel, hidden {hidden:,}", 0, **at_least_as(1), measure=partial(tokens, hidden)
        )
        for hidden in pytorch.HIDDEN
    },
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=names_of(ROWS), default=list(ROWS), metavar="ROWS", help=f"of {','.join(ROWS)}")
    parser.add_argument("--turns", type=at_least(1), default=7, metavar="N", help="turns of each candidate (7)")
    parser.add_argument("--steps", type=at_least(1), default=3, metavar="N", help="or tokens, timed in each turn (3)")
    parser.add_argument("--profile", action="store_true", help="show where the time is spent, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn to FILE")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 0 if all rows could be measured."""
    facts, report, failed, profiles = machine(), {}, [], []
    print(f"# {heading(facts)}; medians of {args.turns} turns", flush=True)
    print_head("row", "work", "distopt", "peer", "score", "wanted", "met", "notes")
    with ExitStack() as stack:
        rows = [ROWS[name] for name in args.only]
        net = stack.enter_context(two_hosts()) if any(row.ranks and row.hosts == 2 for row in rows) else None
        more = {row.hosts for row in rows if row.hosts > 2}
        hosts = {count: stack.enter_context(near_hosts(count, f"-{count}")) for count in more}
        for name, row in zip(args.only, rows, strict=True):
            site = Site(2)
            if row.hosts > 2:
                site = NamespaceSite(hosts[row.hosts], row.ranks)
            elif row.ranks:
                site = EmulatedSite(net, row.ranks, bound=row.bound)
            try:
                result = row.measure(site, args)
            except DistoptError as error:
                failed.append(f"# not measured: {name}: {error}")
                continue
            report[name] = {"ours": result.ours, "peer": result.peer, "score": result.score, "notes": result.extra}
            met = "yes" if row.met(result.score) else "no"
            cells = time_of(result.ours), time_of(result.peer), f"{result.score:.2f}", row.wanted, met, result.extra
            print_row(name, row.work, *cells)
            profiles += [f"\n{row.work}:\n\n{result.profile}"] if result.profile else []
    print("\n".join(profiles), end="\n" if profiles else "")
    print("\n".join(failed), end="\n" if failed else "")
    if args.json:
        write_json(args.json, {"benchmark": "never-slower", "machine": facts, "rows": report})
    return 1 if failed else 0


def time_of(turns: Sequence[float]) -> str:
    """The median of some seconds, and their range."""
    factor, unit = (1e3, "ms") if median(turns) > 1e-3 else (1e6, "us")
    middle, low, high = (f"{value * factor:.3g}" for value in (median(turns), min(turns), max(turns)))
    return f"{middle} {unit} ({low} to {high})"
