"""The output of a job whose hosts come and go: steps done and lost, pauses, losses, and what its workers hold."""

from __future__ import annotations

import bisect
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

MARK = "churn:"
TOGETHER = "all"  # the name of a step that all processes make together


class Log:
    """The output of the processes of a job.

    Attributes:
        lines: the time of each line with the mark, and its words after it.
        other: the last lines of other output.
    """

    def __init__(self) -> None:
        self.lines: list[tuple[float, list[str]]] = []
        self.other: list[str] = []

    def take(self, line: str) -> None:
        """A line of output."""
        if words := line.partition(MARK)[2].split():
            self.lines.append((time.monotonic(), words))
        else:
            self.other[:] = [*self.other[-200:], line.rstrip()]


@dataclass(frozen=True)
class Fault:
    """A host that was lost at `begin`, and back at `end`."""

    kind: str
    host: int
    begin: float
    end: float

    def shared(self, begin: float, end: float) -> float:
        """The seconds of it between two times."""
        return max(0.0, min(end, self.end) - max(begin, self.begin))


class Outcome:
    """Of a run, from `begin` to `end`.

    Attributes:
        faults: what happened.
        samples: that have been trained, and not lost.
        lost: samples.
        pauses: seconds, for each fault; of an undisturbed run the longest one.
        losses: samples and loss, in the order of the samples; with workers, the samples that have been averaged.
        curve: seconds and samples so far.
        workers: for distopt's DiLoCo.
    """

    def __init__(self, log: Log, faults: Sequence[Fault], begin: float, end: float) -> None:
        self.faults = faults
        self.samples = self.lost = 0
        self.losses: list[tuple[int, float]] = []
        self.curve: list[tuple[float, int]] = []
        self.workers = Workers(faults)
        pending: dict[str, int] = {}  # samples since the last average, by process
        reached: dict[str, int] = {}
        gaps: list[tuple[str, float, float]] = []  # between two steps of a process: its name, begin, end
        last: dict[str, float] = {}  # time of the last new step, by process
        averaged: Counter[int] = Counter()  # samples, by the number of the average
        after: dict[int, float] = {}  # losses, by the same
        average = 0
        for at, (what, *words) in [line for line in log.lines if line[0] <= end]:
            self.curve.append((at - begin, self.samples + sum(pending.values())))
            name = words[0]
            if what == "loss" and average:
                after[average] = float(name)
            elif what == "loss":
                self.losses.append((self.samples + sum(pending.values()), float(name)))
            elif what == "average":
                average = int(words[1]) if len(words) > 1 else 0
                averaged[average] += pending.get(name, 0)
                self.samples += pending.pop(name, 0)
            elif what in ("began", "lost"):
                self.lost += pending.pop(name, 0)
                if what == "began":
                    last.pop(name, None)
            else:
                step, samples = int(words[1]), int(words[2])
                if name == TOGETHER and step <= reached.get(name, 0):
                    self.lost += samples
                    continue
                reached[name] = step
                if name in last:
                    gaps.append((name, last[name], at))
                last[name] = at
                if name == TOGETHER:
                    self.samples += samples
                else:
                    pending[name] = pending.get(name, 0) + samples
            self.workers.take(at, what, words)
        if after:
            counts = accumulate(averaged[number] for number in sorted(after))
            self.losses = [*zip(counts, (after[number] for number in sorted(after)), strict=True)]
        self.samples += sum(pending.values())
        gaps += [(name, at, end) for name, at in last.items()]
        spans = [*pairwise([*(fault.begin for fault in faults), end])] or [(begin, end)]
        self.pauses = [_pause(gaps, faults, *span) for span in spans]

    def loss_at(self, samples: int) -> float:
        """Between two known ones, by a line; none without two."""
        known = self.losses
        if len(known) < 2:
            return float("nan")
        i = min(max(bisect.bisect([at for at, _ in known], samples), 1), len(known) - 1)
        (x, first), (y, second) = known[i - 1], known[i]
        return first + (second - first) * (samples - x) / max(1, y - x)


def _pause(gaps: Sequence[tuple[str, float, float]], faults: Sequence[Fault], begin: float, end: float) -> float:
    """The longest time without a new step that ends after `begin`, of those that are not lost in it."""
    longest = 0.0
    for name, last, new in gaps:
        if new > begin and last < end and not any(each.shared(last, new) for each in faults if str(each.host) == name):
            longest = max(longest, min(new, end) - last)
    return longest


class Workers:
    """The workers of distopt's DiLoCo.

    Attributes:
        went_back: steps with a number that is not above that of the same worker's step before.
        averages: seconds from the last step before an average to the first after it, of each worker and average.
        seconds: of workers that had joined, but not while they were lost.
        waited: seconds of those, for others, outside of averages that counted.
        digests: of the parameters that workers held after each average.
        joined: workers that joined others.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self.went_back = self.joined = 0
        self.averages: list[float] = []
        self.seconds = self.waited = 0.0
        self.digests: dict[int, set[str]] = defaultdict(set)
        self._last: dict[str, tuple[float, int, float]] = {}  # time, number, and seconds waited, by name
        self._gaps: dict[str, float] = {}  # seconds between the last two steps, by name

    def take(self, at: float, what: str, words: Sequence[str]) -> None:
        """A line of the output."""
        name = words[0]
        if what == "step" and len(words) > 3:
            number, waited = int(words[1]), float(words[3])
            began, before, waited_before = self._last[name]
            lost = sum(each.shared(began, at) for each in self._faults if str(each.host) == name)
            self.went_back += number <= before
            self.seconds += at - began - lost
            self.waited += max(0.0, waited - waited_before - lost)
            self._last[name], self._gaps[name] = (at, number, waited), at - began
        elif what in ("began", "average") and len(words) > 2:
            number, digest = int(words[1]), words[2]
            self.digests[number].add(digest)
            if what == "began":
                self.joined += number > 0
                self._last[name] = at, -1, 0.0
            else:
                self.averages.append(self._gaps[name])

    @property
    def goodput(self) -> float:
        """The share of the time in which workers computed, or were inside averages that counted."""
        return 1 - self.waited / self.seconds


# How much longer than twice an undisturbed average others may stand still, in seconds.
_LONGER = {"kill": 1.0, "freeze": 3.0, "cut": 3.0}


def verdicts(plain: Outcome, found: Outcome) -> list[str]:
    """How a DiLoCo of distopt bears faults, beside its undisturbed run; a line that begins with NOT is bad."""
    if not (plain.workers.averages and found.workers.averages):
        return ["NOT one average in a run; give more --seconds, or a smaller --sync-every"]
    workers, average = found.workers, median(plain.workers.averages)
    lines = [
        (
            f"{workers.went_back} steps of a worker that have not a higher number than the one before",
            not workers.went_back,
        )
    ]
    for kind, longer in _LONGER.items():
        pauses = [pause for fault, pause in zip(found.faults, found.pauses, strict=True) if fault.kind == kind]
        most = 2 * average + longer
        if pauses:
            text = f"{max(pauses):.2f} s is the longest pause after a {kind}, of {len(pauses)}; twice an undisturbed average"
            lines.append((f"{text} ({average:.2f} s) and {longer:g} s are {most:.2f} s", max(pauses) <= most))
    differ = sum(len(each) > 1 for each in workers.digests.values())
    text = (
        f"{differ} of {len(workers.digests)} averages after which workers differ; {workers.joined} have joined others"
    )
    lines.append((text, not differ))
    good = f"{workers.goodput:.1%} of the workers' time computing or in averages that count"
    lines.append((f"{good} (undisturbed {plain.workers.goodput:.1%})", workers.goodput >= 0.95))
    return [f"{'' if holds else 'NOT '}{text}" for text, holds in lines]
