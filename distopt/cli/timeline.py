"""`distopt timeline`: one trace of the timelines of all ranks, and what they say."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

from ..errors import DataError, MissingDependencyError
from ..recorder.timeline import TRACKS

Event: TypeAlias = "dict[str, Any]"

_PARTS = ("forward", "backward", "encode", "wait", "decode", "update", "other")
_COLORS = ("#4c78a8", "#72b7b2", "#eeca3b", "#e45756", "#b279a2", "#54a24b", "#bab0ac")
_MUCH = 0.15  # of a step: worth a change
_LATER = TRACKS // 10  # between the tracks of a process and those of the next one of its rank


@dataclass
class RankTimeline:
    """The timeline of a rank, in us of the clock of rank 0's host.

    Attributes:
        host: its name.
        shift: lead of its own clock, in us.
        error: by how much that may be wrong, in us.
        events: of Chrome's trace format.
    """

    host: str
    shift: int
    error: float
    events: list[Event]

    def named(self, name: str) -> list[Event]:
        """The bars of that name."""
        return [event for event in self.events if event["name"] == name]


def load(folder: Path) -> dict[int, RankTimeline]:
    """The timelines in a folder, by rank; their bars by beginning.

    Raises:
        DataError: there are none, or a file is none, or they are of several jobs.
    """
    bounds: dict[str, tuple[int, int]] = {}
    files = [_events_in(path) for path in folder.glob("rank-*.json")]
    for clock, *_ in files:  # the ranks of a host have one clock, so all their bounds hold for it
        about = clock["args"]
        low, high = bounds.get(about["host"], (about["low_ns"], about["high_ns"]))
        bounds[about["host"]] = max(low, about["low_ns"]), min(high, about["high_ns"])
    if not files:
        raise DataError(f"there is no timeline in {folder}; run a job with DISTOPT_TIMELINE={folder}")
    ranks: dict[int, RankTimeline] = {}
    attempts: dict[int, list[int]] = {}
    for clock, *events in sorted(files, key=lambda events: events[0]["args"]["began"]):
        number, host, (low, high) = clock["args"]["rank"], clock["args"]["host"], bounds[clock["args"]["host"]]
        attempt = clock["args"]["attempt"]
        if number in attempts and attempt <= attempts[number]:  # else the rank has been started again
            raise DataError(
                f"{folder} has timelines of several jobs, as of rank {number}; keep each job in a folder of its own"
            )
        attempts[number] = attempt
        rank = ranks.setdefault(number, RankTimeline(host, round((low + high) / 2e3), abs(high - low) / 2e3, []))
        bars = sorted((event for event in events if "ts" in event), key=lambda bar: (bar["ts"], -bar["dur"]))
        for bar in bars:
            bar["ts"] -= rank.shift
        if rank.events and bars:  # an earlier process of this rank has ended
            end = max(bar["ts"] + bar["dur"] for bar in rank.events if "ts" in bar)
            bars.insert(0, {**bars[0], "name": "healing", "ts": end, "dur": bars[0]["ts"] - end, "tid": clock["tid"]})
            for event in events:
                event["tid"] += _LATER if event["tid"] % TRACKS else 0
        rank.events += [clock, *(event for event in events if "ts" not in event), *bars]
    return dict(sorted(ranks.items()))


def _events_in(path: Path) -> list[Event]:
    try:  # the last line may be cut
        events = [json.loads(line[:-1]) for line in path.read_text().splitlines()[1:] if line.endswith(",")]
        events[0]["args"]["low_ns"], events[0]["args"]["attempt"]
    except (ValueError, LookupError, TypeError):
        raise DataError(f"{path} is no timeline of distopt; give a folder that has no other file rank-*.json") from None
    return events


def merge(folder: Path) -> str:
    """Write `trace.json`, one trace of all ranks; where it is, and how exact."""
    ranks = load(folder)
    events = [event for rank in ranks.values() for event in rank.events]
    for number, rank in ranks.items():
        named = {"args": {"name": f"rank {number}, {rank.host}"}}
        events.append({"name": "process_name", "ph": "M", "pid": number + 1, **named})
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, "otherData": {"clocks": clock_note(ranks)}}))
    return f"{path}: {clock_note(ranks)}"


def clock_note(ranks: dict[int, RankTimeline]) -> str:
    """How exactly the clocks of the ranks agree."""
    known = {f"{rank.host} within {rank.error / 1e3:.3f} ms": 1 for rank in ranks.values() if rank.error}
    return f"clocks, when the job began: {', '.join(known)} of rank 0's" if known else "all ranks have one clock"


@dataclass(frozen=True)
class Summary:
    """Where the time of steps goes.

    Attributes:
        ms: of a step, by rank and part.
        hidden: by rank, the share of the time with data on the wire in which the rank did not wait.
        last: by rank, the share of steps in which it sent its first bucket last.
        late: by rank, how much later than the median of the others it did, in ms, as a median over the steps.
        healing: by rank, the seconds of healing in between, which count for no step.
    """

    ms: dict[int, dict[str, float]]
    hidden: dict[int, float]
    last: dict[int, float]
    late: dict[int, float]
    healing: dict[int, float]


def summarize(ranks: dict[int, RankTimeline]) -> Summary:
    """Raises a DataError for a timeline of fewer than three steps; the first one is left out."""
    ms, hidden, healing = {}, {}, {}
    for number, rank in ranks.items():
        starts = [bar["ts"] for bar in rank.named("backward")]
        if len(starts) < 3:
            raise DataError(f"the timeline of rank {number} has {len(starts)} steps; train for three or more")
        count, inside = len(starts) - 2, [bar for bar in rank.events if starts[1] <= bar.get("ts", 0) < starts[-1]]
        own = _own_times([bar for bar in inside if not bar["tid"] % TRACKS])
        ms[number] = {part: own[part] / count / 1e3 for part in _PARTS}
        healing[number] = own["healing"] / 1e6
        ms[number]["other"] = (starts[-1] - starts[1] - own["healing"]) / count / 1e3 - sum(ms[number].values())
        wire, wait = (_covered([bar for bar in inside if bar["name"] == name]) for name in ("wire", "wait"))
        hidden[number] = max(1 - wait / wire, 0.0) if wire else 0.0
    first = next((bar["args"]["bucket"] for bar in ranks[min(ranks)].named("wire")), "")
    sent = [[bar["ts"] for bar in rank.named("wire") if bar["args"]["bucket"] == first] for rank in ranks.values()]
    steps = [dict(zip(ranks, row, strict=True)) for row in [*zip(*sent, strict=False)][1:]]
    lasts = Counter(max(row, key=row.__getitem__) for row in steps)
    late = {q: [row[q] - median([ts for r, ts in row.items() if r != q] or [row[q]]) for row in steps] for q in ranks}
    last = {number: lasts[number] / max(len(steps), 1) for number in ranks}
    return Summary(ms, hidden, last, {number: median(each or [0]) / 1e3 for number, each in late.items()}, healing)


def _own_times(bars: Sequence[Event]) -> Counter[str]:
    """Durations by name, without those of bars inside; `bars` by beginning."""
    own: Counter[str] = Counter()
    around: list[Event] = []
    for bar in bars:
        while around and around[-1]["ts"] + around[-1]["dur"] <= bar["ts"]:
            around.pop()
        own[bar["name"]] += bar["dur"]
        if around:
            own[around[-1]["name"]] -= bar["dur"]
        around.append(bar)
    return own


def _covered(bars: Sequence[Event]) -> int:
    """The time in which there is at least one of the bars; `bars` by beginning."""
    covered = end = 0
    for bar in bars:
        until = bar["ts"] + bar["dur"]
        covered += max(until - max(bar["ts"], end), 0)
        end = max(end, until)
    return covered


def report(ranks: dict[int, RankTimeline]) -> str:
    """The summary in words."""
    summary = summarize(ranks)
    lines = [f"{len(ranks)} ranks; {clock_note(ranks)}"]
    lines.append(f"{'ms of a step':24}" + "".join(f"{part:>9}" for part in (*_PARTS, "step", "hidden")))
    for number, rank in ranks.items():
        cells = [*summary.ms[number].values(), sum(summary.ms[number].values())]
        numbers = "".join(f"{cell:9.2f}" for cell in cells)
        lines.append(f"{f'rank {number}, {rank.host}':24.24}{numbers}{summary.hidden[number]:9.0%}")
    if (seconds := max(summary.healing.values())) > 0:
        lines.append(f"Healing took {seconds:.2f} s, which count for no step.")
    return "\n".join([*lines, *findings(ranks, summary)])


def findings(ranks: dict[int, RankTimeline], summary: Summary) -> list[str]:
    """The rank that the others wait for, and what would make a step shorter."""
    means = {part: mean(ms[part] for ms in summary.ms.values()) for part in _PARTS}
    slow, step, wait = max(summary.last, key=summary.last.__getitem__), sum(means.values()), means["wait"]
    late, share = summary.late[slow], summary.last[slow]
    found = f"Rank {slow} is the last to send in {share:.0%} of the steps, {late:.2f} ms late (median)."
    if len(ranks) > 1 and share > 0.5 and late > max(_MUCH * step, ranks[slow].error / 1e3):
        excess = {part: summary.ms[slow][part] - median(ms[part] for ms in summary.ms.values()) for part in _PARTS}
        part = max(set(_PARTS) - {"wait"}, key=excess.__getitem__)
        cure = f"Its {part} takes {excess[part]:.2f} ms more than that of others, of {step:.2f} ms: shorten that."
        return [f"{found} The others wait for it.", f"{cure} Data are loaded in `other`, between the phases."]
    cure = f"The largest part is {max(_PARTS, key=means.__getitem__)}; waiting costs little."
    if wait > _MUCH * step:
        cure = f"All ranks wait, for {wait / step:.0%} of a step: send less by a codec, or earlier in smaller buckets."
    return [f"{found} No rank keeps the others waiting.", cure]


def plot(ranks: dict[int, RankTimeline], path: Path) -> None:
    """A picture of the summary: a bar for every rank.

    Raises:
        MissingDependencyError: matplotlib is absent.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("the plot needs matplotlib; pip install matplotlib") from None
    summary, left = summarize(ranks), [0.0] * len(ranks)
    axes = (figure := Figure(figsize=(9, 1.8 + 0.45 * len(ranks)), layout="constrained")).subplots()
    for part, color in zip(_PARTS, _COLORS, strict=True):
        widths = [summary.ms[number][part] for number in ranks]
        names = [f"rank {number}\n{rank.host}" for number, rank in ranks.items()]
        axes.barh(names, widths, left=left, color=color, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="ms of a step (mean)", title=findings(ranks, summary)[0])
    figure.legend(ncols=len(_PARTS), loc="outside lower center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("timeline", help="read the timelines that DISTOPT_TIMELINE=FOLDER has written")
    actions = {"merge": "write FOLDER/trace.json for ui.perfetto.dev", "summary": "say where the time of a step goes"}
    actions |= {"plot": "draw the summary to FOLDER/summary.png"}
    parser.add_argument("action", choices=actions, help="; ".join(f"{name}: {text}" for name, text in actions.items()))
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.action == "merge":
        print(merge(args.folder))
    elif args.action == "summary":
        print(report(load(args.folder)))
    else:
        plot(load(args.folder), args.folder / "summary.png")
    return 0
