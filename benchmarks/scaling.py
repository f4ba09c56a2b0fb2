"""Predict training steps on 2 to 1,024 ranks over a given network from measured tables.

Latency and bandwidth are fitted to tables of `all-reduce --json`. The error against every measured point is printed.

    python -m benchmarks scaling all-reduce.json --train train.json --gbit 25
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distopt.cli.values import at_least, byte_size, names_of, positive
from distopt.errors import DataError, UsageError

from .models.scaling import ALGORITHMS, STRATEGIES, Curve, Line, Network, Prediction, Training, fit, predict
from .output import write_json

_LARGEST = 1024
# Fields that every row of a file must have.
_COLUMNS = {
    "all-reduce": {"who", "buffers", "world_size", "size_bytes", "median_seconds"},
    "train": {"who", "world_size", "batch_size", "median_seconds", "phases"},
}


@dataclass(frozen=True)
class Fit:
    """A fitted curve, and what it was fitted to: points (bytes, seconds, fitted / measured - 1)."""

    who: str
    buffers: str
    world_size: int
    curve: Curve
    points: list[tuple[int, float, float]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE", help="files of all-reduce --json")
    parser.add_argument("--train", type=Path, metavar="FILE", help="of train --json: step time and gradient size")
    parser.add_argument("--step-ms", type=positive, metavar="MS", help="or give the step time of one process")
    parser.add_argument("--backward-ms", type=positive, metavar="MS", help="the part of it that can hide communication")
    parser.add_argument("--bytes", type=byte_size, metavar="SIZE", help="size of its gradients in float32")
    parser.add_argument("--batch-size", type=at_least(1), default=64, metavar="N", help="its samples (64)")
    parser.add_argument("--gbit", type=positive, default=10.0, metavar="G", help="Gbit/s between hosts, of each (10)")
    parser.add_argument("--latency-us", type=positive, default=20.0, metavar="US", help="of a message (20)")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="ring", help="between hosts (ring)")
    parser.add_argument("--who", default="shm", metavar="NAME", help="candidate in the table, within a host (shm)")
    parser.add_argument("--buffers", default="wire", metavar="KIND", help="and its kind of memory (wire)")
    parser.add_argument("--per-host", type=at_least(1), metavar="N", help="ranks per host (as in the table)")
    strategies = list(STRATEGIES)
    parser.add_argument("--strategy", type=names_of(STRATEGIES), default=strategies, help="what is sent (all)")
    parser.add_argument("--ratio", type=positive, default=0.01, metavar="R", help="share that sparseTopK sends (0.01)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write fits and predictions to FILE")


def run(args: argparse.Namespace) -> int:
    """Fit, predict and print; return 0."""
    fits = _fits(args.tables)
    per_host, local = _local(args, fits)
    report = _load(args.train, "train") if args.train else None
    training = _training_of(report, per_host) if report else _training_given(args)
    network = Network(Line(args.latency_us * 1e-6, 8e-9 / args.gbit), args.algorithm)
    predictions = [
        predict(training, local, network, per_host, 2**power, strategy, args.ratio)
        for strategy in args.strategy
        for power in range(1, _LARGEST.bit_length())
    ]
    _print_fits(fits)
    if report and local:
        _print_train_error(report, training, local, per_host)
    _print_predictions(args, training, per_host, predictions)
    if args.json:
        result = {"training": training, "network": network, "fits": fits, "predictions": predictions}
        write_json(args.json, {"benchmark": "model", **result})
    return 0


# -- measurements -------------------------------------------------------------------------------------------------
def _load(path: Path, benchmark: str) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        cure = f"write it with python -m benchmarks {benchmark} --json"
        raise DataError(f"{path} cannot be read ({error}); {cure}") from error
    rows = report.get("rows") if isinstance(report, dict) and report.get("benchmark") == benchmark else None
    if not rows or any(_COLUMNS[benchmark] - row.keys() for row in rows):
        raise DataError(f"{path} has no measurements of {benchmark}; write it with its --json")
    return dict(report)


def _fits(tables: list[Path]) -> list[Fit]:
    measured: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for path in tables:
        for row in _load(path, "all-reduce")["rows"]:
            key = row["who"], row["buffers"], row["world_size"]
            measured.setdefault(key, []).append((row["size_bytes"], row["median_seconds"]))
    fits = []
    for key, points in measured.items():
        curve = fit(points)
        fits.append(Fit(*key, curve, [(size, seconds, curve.time(size) / seconds - 1) for size, seconds in points]))
    return fits


def _local(args: argparse.Namespace, fits: list[Fit]) -> tuple[int, Curve | None]:
    """Ranks per host, and the curve for that number."""
    if args.per_host == 1:
        return 1, None
    curves = {found.world_size: found.curve for found in fits if (found.who, found.buffers) == (args.who, args.buffers)}
    if not curves:
        known = ", ".join(sorted({f"--who {found.who!r} --buffers {found.buffers!r}" for found in fits}))
        raise UsageError(f"no table has --who {args.who!r} --buffers {args.buffers!r}; they have {known}")
    per_host = args.per_host or max(curves)
    if per_host not in curves:
        known = ", ".join(map(str, sorted(curves)))
        raise UsageError(f"no table has {per_host} ranks of {args.who}, {args.buffers}; they have {known}")
    return per_host, curves[per_host]


def _training_of(report: dict[str, Any], per_host: int) -> Training:
    rows = {row["world_size"]: row for row in report["rows"] if row["who"] == "distopt"}
    if 1 not in rows or per_host not in rows:
        raise UsageError(f"the training file must have steps of 1 and of {per_host} ranks; it has {sorted(rows)}")
    crowded = rows[per_host]
    return Training(
        alone=rows[1]["median_seconds"],
        compute=crowded["median_seconds"] - crowded["phases"]["communication"],
        backward=crowded["phases"]["backward"],
        count=report["gradient_count"],
        batch_size=crowded["batch_size"],
    )


def _training_given(args: argparse.Namespace) -> Training:
    if args.step_ms is None or args.bytes is None:
        raise UsageError("a step is needed: --train FILE, or --step-ms and --bytes")
    step, backward = args.step_ms * 1e-3, (args.backward_ms or 0.0) * 1e-3
    if backward > step:
        raise UsageError(f"--backward-ms {args.backward_ms:g} is longer than the step of {args.step_ms:g} ms")
    return Training(step, step, backward, args.bytes // 4, args.batch_size)


# -- output ------------------------------------------------------------------------------------------------------
def _print_fits(fits: list[Fit]) -> None:
    print("# fits: time = latency + size / bandwidth, least squares of relative errors; error: fitted / measured - 1")
    for found in fits:
        line, knee = found.curve.line, found.curve.knee_bytes
        beyond = f", beyond {knee:.0f} B {_bandwidth(found.curve.slope)}" if knee is not None else ""
        print(
            f"# {found.who}, {found.buffers}, {found.world_size} ranks: latency {line.latency * 1e6:.1f} us, bandwidth "
            f"{_bandwidth(line.seconds_per_byte)}{beyond}"
        )
        print(f"#{'size (B)':>13}{'measured (us)':>15}{'fitted (us)':>13}{'error':>9}")
        for size, seconds, error in found.points:
            print(f" {size:>13}{seconds * 1e6:>15.1f}{found.curve.time(size) * 1e6:>13.1f}{error:>+9.0%}")


def _bandwidth(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte else "unlimited"


def _print_train_error(report: dict[str, Any], training: Training, local: Curve, per_host: int) -> None:
    measured = next(row for row in report["rows"] if (row["who"], row["world_size"]) == ("distopt", per_host))
    step = training.compute + local.time(4 * training.count)
    seconds = measured["median_seconds"]
    print(
        f"# step of {per_host} ranks on one host, nothing hidden: measured {seconds * 1e3:.2f} ms, predicted "
        f"{step * 1e3:.2f} ms, error {step / seconds - 1:+.0%}"
    )


def _print_predictions(
    args: argparse.Namespace, training: Training, per_host: int, predictions: list[Prediction]
) -> None:
    print(
        f"# prediction: {training.count:,} gradients, {training.alone * 1e3:.2f} ms a step alone, {per_host} ranks a "
        f"host, {args.gbit:g} Gbit/s, {args.latency_us:g} us, {args.algorithm}; encoding is not in the model"
    )
    print("# step and efficiency: with no communication hidden, then with as much hidden behind backward as possible")
    print(
        f"#{'ranks':>6}{'hosts':>7}  {'strategy':<12}{'comm (ms)':>10}{'step (ms)':>20}"
        f"{'samples/s':>12}{'efficiency':>16}"
    )
    for found in predictions:
        step = " ... ".join(f"{seconds * 1e3:.2f}" for seconds in found.step)
        efficiency = " ... ".join(f"{share:.0%}" for share in found.efficiency)
        speed = found.ranks * training.batch_size / found.step[0]
        print(
            f" {found.ranks:>6}{found.hosts:>7}  {found.strategy:<12}{found.communication * 1e3:>10.2f}{step:>20}"
            f"{speed:>12.0f}{efficiency:>16}"
        )
