"""A language model trained over slow links: loss against seconds and bytes, by DDP, hooks and DiLoCo, Gloo and distopt.

Trains a model of examples/pytorch/language between hosts that are network namespaces of this machine, one rank on each;
see `networks.far`. The goal is the validation loss of the first way after `--steps`; every other way trains as many
steps, and on until it has reached the goal, twice as many at most. Seconds are those of the training loop, validations
included, and seconds to the goal are interpolated between two validations. Bytes are those that a host's network
interface has sent, headers included.

Needs root, PyTorch and the extra "language".

    sudo .venv/bin/python -m benchmarks language --hosts 4 --rate 20
    sudo .venv/bin/python -m benchmarks language --model smollm2 --hosts 2 --rate 20 --only diloco,sparse-loco \
        --steps 20 --sync-every 10 --batch-size 2
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from distopt.cli.values import at_least
from distopt.errors import DistoptError

from .networks.emulation import LINK, Host
from .networks.far import add_link, far_hosts, link_of, number_of_hosts
from .options import names_of
from .output import ROOT, heading, machine, put, table, write_json

EXAMPLE = ROOT / "examples" / "pytorch" / "language" / "train.py"
PORT = "29413"
# Name: label, way of the example, and backend of its group.
WAYS = {
    "gloo": ("DDP over Gloo", "ddp", "gloo"),
    "gloo-fp16": ("DDP over Gloo, PyTorch's fp16 hook", "ddp-fp16", "gloo"),
    "gloo-power-sgd": ("DDP over Gloo, PyTorch's PowerSGD hook", "ddp-power-sgd", "gloo"),
    "ddp": ("DDP", "ddp", "distopt"),
    "power-sgd": ("DDP, PyTorch's PowerSGD hook", "ddp-power-sgd", "distopt"),
    "hook-fp16": ("hook fp16", "hook-fp16", "distopt"),
    "hook-4-bit": ("hook 4 bits", "hook-4-bit", "distopt"),
    "hook-top-k": ("hook top-K 1 %", "hook-top-k", "distopt"),
    "hook-chunked-top-k": ("hook 64 of 4,096 in 2 bits", "hook-chunked-top-k", "distopt"),
    "gloo-diloco": ("DiLoCo over Gloo", "diloco", "gloo"),
    "diloco": ("DiLoCo", "diloco", "distopt"),
    "diloco-top-k": ("DiLoCo, top-K 5 %", "diloco-top-k", "distopt"),
    "diloco-4-bit": ("DiLoCo, 4 bits", "diloco-4-bit", "distopt"),
    "diloco-streams": ("DiLoCo, 4 bits, 3 fragments, delayed", "diloco-streams", "distopt"),
    "sparse-loco": ("SparseLoCo", "sparse-loco", "distopt"),
}


class Point(NamedTuple):
    """A validation; `sent_bytes`: the mean over the hosts."""

    step: int
    loss: float
    seconds: float
    sent_bytes: float


class Curve(list[Point]):
    """The validations of a run, the first of them before training."""

    def loss_at(self, step: int) -> float:
        """The loss after so many steps; NaN without a validation there."""
        return next((point.loss for point in self if point.step == step), float("nan"))

    def seconds_to(self, loss: float) -> float:
        """Seconds to the first validation that is as good, infinite if none is."""
        if self and self[0].loss <= loss:
            return self[0].seconds
        for before, point in pairwise(self):
            if point.loss <= loss:
                share = (before.loss - loss) / (before.loss - point.loss)
                return before.seconds + share * (point.seconds - before.seconds)
        return float("inf")

    def mean(self, field: str) -> float:
        """Seconds or bytes of a step."""
        last = self[-1]
        return getattr(last, field) / last.step


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=names_of(WAYS), default=list(WAYS), help=f"({','.join(WAYS)})")
    parser.add_argument("--model", choices=["tiny", "smollm2"], default="tiny", help="(tiny)")
    parser.add_argument("--hosts", type=number_of_hosts, default=4, metavar="H", help="(4)")
    add_link(parser)
    parser.add_argument("--steps", type=at_least(1), default=300, metavar="N", help="(300)")
    parser.add_argument(
        "--sync-every", type=at_least(1), metavar="N", help="steps from average to average (each way's)"
    )
    parser.add_argument("--test-every", type=at_least(1), default=30, metavar="N", help="steps (30)")
    parser.add_argument("--batch-size", type=at_least(1), default=8, metavar="N", help="samples of a host (8)")
    parser.add_argument("--test-samples", type=at_least(1), default=32, metavar="N", help="of a validation (32)")
    parser.add_argument("--seed", type=at_least(0), default=1, help="(1)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses, by Matplotlib")
    parser.add_argument("--output", type=Path, metavar="PAGE", help="write the table between its marks, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every validation to FILE")


def run(args: argparse.Namespace) -> int:
    """Train and print; return 1 if a job has failed."""
    facts, link = machine(), link_of(args)
    conditions = f"{args.model}, {args.batch_size} samples a host and step, {args.hosts} hosts, {link}"
    print(f"# {heading(facts)}\n# {conditions}", flush=True)
    head = ["way", "s a step", "MB a step", f"loss after {args.steps} steps", "s to the goal", "times"]
    print(table(head, []), flush=True)
    goal, slowest = float("-inf"), 0.0
    curves: dict[str, Curve] = {}
    rows: list[list[str]] = []
    for name in args.only:
        label = WAYS[name][0]
        try:
            curve = curves[label] = train(name, goal, args)
        except DistoptError as error:
            print(f"# {label}: {error}", flush=True)
            continue
        if not rows:
            goal, slowest = curve.loss_at(args.steps), curve.seconds_to(curve.loss_at(args.steps))
        rows.append([label, *cells(curve, goal, slowest, args)])
        print(f"| {' | '.join(rows[-1])} |", flush=True)
    if args.output and len(rows) == len(args.only):
        text = f"{facts['cores']} cores of {facts['processor']}, Linux {facts['kernel']}. {conditions}."
        put(args.output, f"language {args.model} {args.hosts} {args.rate:g}", f"{text}\n\n{table(head, rows)}")
    if args.json:
        write_json(args.json, {"benchmark": "language", "machine": facts, "conditions": conditions, "points": curves})
    if args.plot and curves:
        plot(args.plot, curves)
    return int(len(rows) < len(args.only))


def cells(curve: Curve, goal: float, slowest: float, args: argparse.Namespace) -> list[str]:
    """A row of the table, without its label."""
    seconds, sent = curve.seconds_to(goal), curve.mean("sent_bytes") / 1e6
    reached = [f"{seconds:.0f}", f"{slowest / seconds:.1f}"] if seconds < float("inf") else ["not reached", ""]
    loss = f"{curve.loss_at(args.steps):.4f}"
    return [f"{curve.mean('seconds'):.2f}", f"{sent:.3g}", loss, *reached]


def train(name: str, goal: float, args: argparse.Namespace) -> Curve:
    """Train in one way, between new hosts.

    Raises:
        DistoptError: it has failed.
    """
    _, way, backend = WAYS[name]
    most = args.steps if goal == float("-inf") else 2 * args.steps
    words = ["--model", args.model, "--way", way, "--backend", backend, "--steps", most, "--seed", args.seed]
    words += ["--batch-size", args.batch_size, "--test-every", args.test_every, "--test-samples", args.test_samples]
    words += ["--sync-every", args.sync_every] if args.sync_every else []
    curve = Curve()
    with far_hosts(args.hosts, link_of(args)) as hosts:
        jobs = [start(hosts, rank, [str(EXAMPLE), *map(str, words)]) for rank in range(args.hosts)]
        try:
            before = 0
            for line in jobs[0].stdout:
                if found := re.match(r"step (\d+): loss ([\d.]+|nan), ([\d.]+) s", line):
                    step, loss, seconds = found.groups()
                    sent = sent_bytes(hosts)
                    before = before or sent  # what the start has sent
                    curve.append(Point(int(step), float(loss), float(seconds), (sent - before) / len(hosts)))
                    if int(step) >= args.steps and (float(loss) <= goal or int(step) >= most):
                        break
        finally:
            for job in reversed(jobs):  # the others would report that the first one has ended
                job.kill()
            for job in jobs:
                job.wait()
    if not curve or curve[-1].step < args.steps:
        raise DistoptError(f"no validation after {args.steps} steps; its errors are above")
    return curve


def start(hosts: Sequence[Host], rank: int, words: list[str]) -> subprocess.Popen[str]:
    """Start a rank on its host; the first one's output can be read."""
    env = {"RANK": rank, "WORLD_SIZE": len(hosts), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    env |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": 1}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = ["env", *(f"{name}={value}" for name, value in env.items()), sys.executable, "-W", "ignore", *words]
    out = subprocess.DEVNULL if rank else subprocess.PIPE
    return subprocess.Popen(hosts[rank].inside(command), stdout=out, text=True)


def sent_bytes(hosts: Sequence[Host]) -> int:
    """Bytes that all hosts together have sent."""
    count = 0
    for host in hosts:
        words = ["ip", "netns", "exec", host.namespace, "cat", f"/sys/class/net/{LINK}/statistics/tx_bytes"]
        count += int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return count


def plot(path: Path, curves: dict[str, Curve]) -> None:
    """Draw the losses over seconds and over bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    by_seconds, by_bytes = figure.subplots(1, 2, sharey=True)
    for label, curve in curves.items():
        losses = [point.loss for point in curve]
        by_seconds.plot([point.seconds for point in curve], losses, ".-", label=label)
        by_bytes.plot([point.sent_bytes / 1e6 for point in curve], losses, ".-")
    by_seconds.set(xscale="log", xlabel="seconds", ylabel="validation loss")
    by_bytes.set(xscale="log", xlabel="MB sent by a host")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=110)
