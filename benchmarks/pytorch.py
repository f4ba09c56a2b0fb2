"""Process groups of PyTorch over Gloo and over distopt: all-reduce, DDP's and FSDP2's steps, tensor-parallel inference.

Both run the PyTorch of this environment, and take turns in every round. Two more candidates of the steps have hooks in
their DDP: one leaves gradients as they are; one sums an element of each bucket over distopt, so its ranks wait for each
other, as they must with any library. FSDP2 has a third candidate over PyTorch's "fake" group, which moves nothing between
ranks. Tensor-parallel inference computes one token after the other: two sums in each of 24 layers. Bytes are those that one
host sends, headers included.

    python -m benchmarks pytorch --np 2
    sudo .venv/bin/python -m benchmarks pytorch --emulate 2x2 --rate 1gbit --only resnet18,mlp
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from distopt.cli.values import at_least

from .networks.emulation import LINK
from .networks.site import Site, add_places, site_of
from .options import byte_sizes, names_of
from .output import heading, machine, table, write_json
from .peers.crew import Crew
from .peers.lineup import Candidate, Lineup, Setup, torch_crew

SIZES = [1024 * 4**i for i in range(8)]
MODELS = {
    "cnn": ("reference CNN, batch 64", {"batch_size": 64}),
    "resnet18": ("ResNet-18 at 64 x 64, batch 8", {"batch_size": 8, "image_size": 64}),
    "mlp": ("MLP of 25 M, batch 16", {"batch_size": 16}),
}
SUMS, FSDP2, DIVIDED = "all-reduce", "fsdp2", "tensor-parallel"
PARTS = (SUMS, *MODELS, FSDP2, DIVIDED)
HIDDEN, LAYERS = (512, 1024, 2048), 24  # of the network of tensor-parallel inference
NOTHING, WAITING, FAKE, GLOO, DISTOPT, BUCKET = "nothing", "waiting", "fake", "gloo", "distopt", "bucket"
CANDIDATES = {
    NOTHING: {"group": DISTOPT, "hook": NOTHING},
    WAITING: {"group": DISTOPT, "hook": WAITING},
    FAKE: {"group": FAKE},
    GLOO: {"group": GLOO},
    DISTOPT: {"group": DISTOPT},
    BUCKET: {"group": DISTOPT, "memory": "bucket"},  # where groups of one host move the buckets of DDP
}
SENDS = "Gloo sends", "distopt sends"

# candidate -> the answers of its ranks in every round
Answers: TypeAlias = dict[str, list[list[dict[str, Any]]]]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_places(parser, at_least(2))
    parser.add_argument("--only", type=names_of(PARTS), default=list(PARTS), help=f"({','.join(PARTS)})")
    parser.add_argument("--sizes", type=byte_sizes, default=SIZES, help="of all-reduce (1K to 16M)")
    parser.add_argument("--rounds", type=at_least(1), default=20, metavar="N", help="(20)")
    parser.add_argument("--steps", type=at_least(1), default=5, metavar="N", help="sums or tokens of each round (5)")
    parser.add_argument("--hidden", type=hidden_sizes, default=HIDDEN, help="of tensor-parallel (512,1024,2048)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 0 if sums were right, and parameters equal on all ranks."""
    answers: dict[str, Answers] = {}
    facts, wrong = machine(), []
    with ExitStack() as stack:
        site = site_of(args, [], stack)
        print(f"# {site.world_size} ranks{site.described} on {heading(facts)}")
        print(f"# {args.rate or 'no limit of rate'}; medians of {args.rounds} rounds of {args.steps}")
        parts = ((measure_sums, {SUMS}), (measure_steps, {*MODELS}), (measure_fsdp2, {FSDP2}))
        for measure, names in (*parts, (measure_tokens, {DIVIDED})):
            if names & {*args.only}:
                wrong += measure(args, site, answers)
    for name in wrong:
        print(f"# {name}: results are wrong, or differ between ranks")
    if args.json:
        write_json(args.json, {"benchmark": "pytorch", "machine": facts, "rate": args.rate, "answers": answers})
    return 1 if wrong else 0


def measure_sums(args: argparse.Namespace, site: Site, answers: dict[str, Answers]) -> list[str]:
    """Print the table of all-reduce, and add the answers to `answers`; return what was wrong."""
    names, wrong = [GLOO, DISTOPT] if args.emulate or args.hosts else [GLOO, DISTOPT, BUCKET], []
    with Lineup() as lineup:
        fill(lineup, names, "all_reduce", site, {})
        ratios = [f"Gloo / {name}" for name in names[1:]]
        print_head("bytes", *(f"{name} (us)" for name in names), *ratios, *SENDS)
        sums = {"collective": "all_reduce", "buffers": "in place", "dtype": "float32", "samples": args.steps}
        for size in args.sizes:
            count = {"count": size // 4, "capacity": size // 4, "calls": 1}
            found = answers[f"{SUMS} {size}"] = lineup.ask(args.rounds, {**request_of(args), **sums, **count})
            gloo, *ours = (median(of_rounds(found[name])) * 1e6 for name in names)
            times = [f"{time:.0f}" for time in (gloo, *ours)]
            print_row(f"{size:,}", *times, *(f"{gloo / one:.2f}" for one in ours), *sent(found, 1))
            if any(one["wrong"] for rounds in found.values() for ranks in rounds for one in ranks):
                wrong.append(f"{SUMS} of {size:,} bytes")
    return wrong


def measure_steps(args: argparse.Namespace, site: Site, answers: dict[str, Answers]) -> list[str]:
    """As `measure_sums`, of DDP's steps."""
    wrong = []
    print_head("step", "none (ms)", "waiting adds", "Gloo adds", "distopt adds", "distopt / Gloo", *SENDS, "same bits")
    for name in (name for name in MODELS if name in args.only):
        described, options = MODELS[name]
        candidates = [NOTHING, WAITING, GLOO, DISTOPT]
        found = answers[name] = steps_of(candidates, site, {"model": name, **options}, args)
        bare = of_rounds(found[NOTHING])
        # Within a round, so that changes of the machine's speed affect both.
        waiting, gloo, ours = (
            median(with_it - without for with_it, without in zip(of_rounds(found[one]), bare, strict=True)) * 1e3
            for one in (WAITING, GLOO, DISTOPT)
        )
        times = (f"{time:.2f}" for time in (median(bare) * 1e3, waiting, gloo, ours, ours / gloo))
        print_row(described, *times, *sent(found, args.steps), same_bits(found))
        wrong += [name] if len({rank["parameters"] for rank in found[DISTOPT][-1]}) > 1 else []
    return wrong


def measure_fsdp2(args: argparse.Namespace, site: Site, answers: dict[str, Answers]) -> list[str]:
    """As `measure_sums`, of FSDP2's steps."""
    described, options = MODELS["mlp"]
    options = {"model": "mlp", "fsdp2": True, **options}
    found = answers[FSDP2] = steps_of([FAKE, GLOO, DISTOPT], site, options, args)
    bare, gloo, ours = (of_rounds(found[name]) for name in (FAKE, GLOO, DISTOPT))
    ratio = median(one / other for one, other in zip(ours, gloo, strict=True))
    print_head("FSDP2", "none (ms)", "Gloo (ms)", "distopt (ms)", "distopt / Gloo", *SENDS, "same bits")
    times = (*(f"{median(each) * 1e3:.2f}" for each in (bare, gloo, ours)), f"{ratio:.2f}")
    print_row(described, *times, *sent(found, args.steps), same_bits(found))
    return []


def measure_tokens(args: argparse.Namespace, site: Site, answers: dict[str, Answers]) -> list[str]:
    """As `measure_sums`, of tensor-parallel inference."""
    print_head("hidden", "none (tokens/s)", "Gloo", "distopt", "distopt / Gloo", "us a sum", "same bits")
    for hidden in args.hidden:
        found = answers[f"{DIVIDED} {hidden}"] = tokens_of(hidden, site, args)
        bare, gloo, ours = (median(of_rounds(found[name])) for name in (NOTHING, GLOO, DISTOPT))
        speeds = (f"{1 / time:.1f}" for time in (bare, gloo, ours))
        print_row(f"{hidden:,}", *speeds, f"{gloo / ours:.2f}", f"{sum_us(found):.0f}", same_bits(found))
    return []


def request_of(args: argparse.Namespace) -> dict[str, Any]:
    return {"warm_up": 1, "interface": LINK if args.emulate else "lo"}


def fill(lineup: Lineup, names: Iterable[str], module: str, site: Site, options: Setup) -> None:
    """Start the candidates of these names, with `options` added to their setup."""

    def start(name: str) -> tuple[Crew, Setup]:
        crew, setup = torch_crew(module, site, group=DISTOPT)
        return crew, {**setup, **CANDIDATES[name], **options}

    for name in names:
        lineup.add(name, partial(start, name))


def steps_of(names: Iterable[str], site: Site, options: Setup, args: argparse.Namespace) -> Answers:
    """Training steps of the candidates of these names, in turns."""
    with Lineup() as lineup:
        fill(lineup, names, "train", site, options)
        return lineup.ask(args.rounds, {**request_of(args), "steps": args.steps})


def tokens_of(hidden: int, site: Site, args: argparse.Namespace, options: Setup | None = None) -> Answers:
    """Tokens over nothing, Gloo and distopt, in turns, by the same ranks: their weights take gigabytes.

    `options` are added to their setup.
    """
    names = [NOTHING, GLOO, DISTOPT]
    found: Answers = {name: [] for name in names}

    def measure(candidate: Candidate, turn: int) -> None:
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            found[name].append(candidate.crew.ask({"over": name, "tokens": args.steps, "warm_up": 1}))

    with Lineup() as lineup:
        size = {"hidden": hidden, "layers": LAYERS}
        fill(lineup, [DISTOPT], "tensor_parallel", site, {**size, **(options or {})})
        lineup.take_turns(args.rounds, measure)
        lineup.require_all()
    return found


def sum_us(found: Answers) -> float:
    """Microseconds that each sum of a token takes over distopt: the median of the rounds."""
    rounds = zip(of_rounds(found[DISTOPT]), of_rounds(found[NOTHING]), strict=True)
    return median(ours - bare for ours, bare in rounds) / (2 * LAYERS) * 1e6


def hidden_sizes(text: str) -> list[int]:
    """The sizes of "512,1024", each a multiple of 128: two ranks have as many heads of 64 units each."""
    sizes = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if not all(sizes) or any(size % 128 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} are not multiples of 128; write them like 512,1024")
    return sizes


def same_bits(found: Answers) -> str:
    """Whether every rank has the same parameters, or the same tokens, over Gloo and over distopt."""
    gloo, ours = ([rank.get("bits") or rank["parameters"] for rank in found[name][-1]] for name in (GLOO, DISTOPT))
    return "yes" if gloo == ours else "no"


def of_rounds(rounds: list[list[dict[str, Any]]]) -> list[float]:
    """Seconds of a call in every round: the median of the slowest rank's."""
    return [median(max(call) for call in zip(*(rank["seconds"] for rank in ranks), strict=True)) for ranks in rounds]


def sent(found: Answers, calls: int) -> list[str]:
    """Kilobytes that the first host sends in one of the `calls` of an answer."""
    return [
        f"{median(ranks[0]['interface_bytes'] for ranks in found[name]) / calls / 1e3:,.1f} kB"
        for name in (GLOO, DISTOPT)
    ]


def print_head(*cells: str) -> None:
    """Begin a table."""
    print(f"\n{table(cells, [])}", flush=True)


def print_row(*cells: str) -> None:
    """Print a line of a table at once."""
    print(f"| {' | '.join(cells)} |", flush=True)
