"""Tokens from a language model in tensor-parallel ranks: one process, ranks over Gloo and ranks over distopt.

Serves `tiny` and SmolLM2 of examples/pytorch/language, and two Llamas of 12 layers with random parameters, also in more
ranks than there may be cores. A rank computes with one thread; a second candidate with one process has as many threads as the
others have ranks, or cores if these are fewer. All take turns.

    python -m benchmarks serving
    python -m benchmarks serving --only llama --rounds 20
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from statistics import mean, median

from distopt.cli.values import at_least

from .networks.site import Site
from .options import names_of
from .output import heading, machine, put, table, write_json
from .peers.crew import Crew
from .peers.lineup import Lineup, Setup, torch_crew
from .pytorch import DISTOPT, GLOO, Answers, print_head, print_row

# model -> numbers of ranks
RANKS = {"tiny": [2], "smollm2": [3], "llama-512": [2], "llama": [2, 4]}
ONE, THREADS = "one process", "with threads"
HEAD = ("model", "ranks", "one process (tokens/s)", "with threads", "Gloo", "distopt", "distopt / Gloo")
HEAD += ("distopt / one process", "same tokens")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=names_of(RANKS), default=list(RANKS), help=f"({','.join(RANKS)})")
    parser.add_argument("--rounds", type=at_least(1), default=10, metavar="N", help="(10)")
    parser.add_argument("--tokens", type=at_least(1), default=32, metavar="N", help="of each round (32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    parser.add_argument("--output", type=Path, metavar="PAGE", help="write the table into this page")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 0 if the ranks of each candidate agreed about every token."""
    facts = machine()
    print(f"# {heading(facts)}\n# medians of {args.rounds} rounds of {args.tokens} tokens", flush=True)
    print_head(*HEAD)
    answers: dict[str, Answers] = {}
    rows: list[list[str]] = []
    for model in args.only:
        for ranks in RANKS[model]:
            found = answers[f"{model} {ranks}"] = measure(model, ranks, args)
            rows.append(row_of(model, ranks, found))
            print_row(*rows[-1])
    if args.json:
        write_json(args.json, {"benchmark": "serving", "machine": facts, "answers": answers})
    if args.output:
        put(args.output, "serving", table(HEAD, rows))
    agree = [
        len({tuple(rank["tokens"]) for rank in ranks}) == 1
        for each in answers.values()
        for rounds in each.values()
        for ranks in rounds
    ]
    return 0 if all(agree) else 1


def measure(model: str, ranks: int, args: argparse.Namespace) -> Answers:
    """The answers of all candidates."""

    def start(world_size: int, group: str, threads: int) -> tuple[Crew, Setup]:
        crew, setup = torch_crew("serving", Site(world_size), group=DISTOPT)
        return crew, {**setup, "group": group, "model": model, "threads": threads}

    threads = min(ranks, len(os.sched_getaffinity(0)))
    with Lineup() as lineup:
        lineup.add(ONE, partial(start, 1, DISTOPT, 1))
        lineup.add(THREADS, partial(start, 1, DISTOPT, threads))
        lineup.add(GLOO, partial(start, ranks, GLOO, 1))
        lineup.add(DISTOPT, partial(start, ranks, DISTOPT, 1))
        return lineup.ask(args.rounds, {"count": args.tokens})


def row_of(model: str, ranks: int, found: Answers) -> list[str]:
    """A row of the table."""
    times = {name: [max(mean(rank["seconds"]) for rank in each) for each in rounds] for name, rounds in found.items()}
    ratios = (
        median(other / ours for other, ours in zip(times[name], times[DISTOPT], strict=True)) for name in (GLOO, ONE)
    )
    tokens = {tuple(rank["tokens"]) for rounds in found.values() for each in rounds for rank in each}
    speeds = (f"{1 / median(each):.1f}" for each in times.values())
    return [model, str(ranks), *speeds, *(f"{ratio:.2f}" for ratio in ratios), "yes" if len(tokens) == 1 else "no"]
