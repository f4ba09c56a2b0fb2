"""Real jobs that are killed, and jobs that go on with another number of ranks: the example on MNIST.

    python -m tests.checkpoint_runs kills --kills 10 --epochs 1

ends each strategy's job by SIGKILL at random moments, starts it again each time, and compares all that it has saved at
its end, and all that it has printed, with a job that ran undisturbed: to the bit.

    python -m tests.checkpoint_runs ranks --seeds 3 --epochs 6

trains with 2 ranks, from a third of the steps on with 3, and from two thirds on with 2 again, and compares the accuracy
at the end with that of 2 ranks.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.models import sgd, train_cnn
from distopt import launch, opt
from distopt.checkpoint.folder import Manifest, list_checkpoints, read_manifest, read_rank, read_shared
from distopt.cli.values import at_least
from tests.processes import ROOT

CODECS = {"power-sgd": "power-sgd"}  # of DistOpt(codec=...); the others are values of dist_option
STRATEGIES = ["plain", "half", "bf16", "partialUpdate", "sparseTopK", "sparseThreshold", *CODECS]
ACCURACY = re.compile(r"Evaluation accuracy = (\S+),")
LINES = re.compile(r"Training loss = .*\nEvaluation accuracy = [^,]*")


class WithCodec(opt.DistOpt):
    def step_by(self, dist_option, loss, **_) -> None:
        self(loss)


def train(_rank: int, _world_size: int, strategy: str, options: list[str]) -> None:
    codec = CODECS.get(strategy)
    cls = opt.DistOpt if codec is None else WithCodec
    optimizer = cls(sgd(), codec=codec or "fp32", partition_elements=100_000)
    train_cnn.run(optimizer, train_cnn.parse_args("", [*options, "-d", "fp32" if codec else strategy]))


class Job:
    """The job as a process, with its checkpoints in `folder`."""

    def __init__(self, folder: Path, strategy: str, world_size: int, *options: str) -> None:
        job = ["tests.checkpoint_runs", "job", strategy, str(world_size), "--checkpoint", str(folder), *options]
        command = [sys.executable, "-m", *job]
        self.folder = folder
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT)

    def wait_for_step(self, step: int) -> bool:
        """Until it begins to save a step beyond this one; whether it still runs."""
        while newest_step(self.folder) <= step:
            if self.process.poll() is not None:
                return False
            time.sleep(0.001)
        return True

    def kill(self, one_rank: random.Random | None = None) -> str:
        """SIGKILL to all of its processes, or to one of its ranks; what it had printed."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ranks = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        if one_rank is not None and ranks:
            os.kill(int(one_rank.choice(ranks)), signal.SIGKILL)
        else:
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.end(None)

    def end(self, code: int | None = 0) -> str:
        out, _ = self.process.communicate()
        if code is not None and self.process.returncode != code:
            raise SystemExit(f"the job has ended with exit code {self.process.returncode}:\n{out}")
        return out


def newest_step(folder: Path) -> int:
    return max((int(path.name[5:15]) for path in folder.glob("step-*")), default=0)


def everything_in(folder: Path) -> tuple[Manifest, dict[str, np.ndarray], list]:
    newest = list_checkpoints(folder)[-1]
    manifest = read_manifest(newest)
    arrays, notes = {}, []
    for rank in range(manifest.world_size):
        own, of_rank = read_rank(newest, manifest, rank)
        arrays |= {f"{rank}: {key}": array for key, array in own.items()}
        arrays |= read_shared(newest, manifest, rank)
        notes.append(of_rank)
    return manifest, arrays, notes


# -- kills ------------------------------------------------------------------------------------------------------------
def kills(args: argparse.Namespace, folder: Path) -> None:
    for strategy in args.strategies:
        rng = random.Random(f"{args.seed} {strategy}")
        options = [*options_of(args), "--seed", str(args.seed)]
        undisturbed = Job(folder / strategy / "whole", strategy, args.np, *options).end()
        own = folder / strategy / "killed"
        steps = args.images // (64 * args.np) * args.epochs
        printed, landed = "", 0
        for left in range(args.kills, 0, -1):
            begun = newest_step(own)
            job = Job(own, strategy, args.np, *options)
            # One save at least lies between two kills, so that the job gets on.
            if job.wait_for_step(begun + int(rng.uniform(0, 1.5) * (steps - begun) / (left + 1))):
                time.sleep(rng.uniform(0, 0.05))
                landed += 1
                printed += job.kill(rng if rng.random() < 0.5 else None)
            else:
                printed += job.end()
        printed += Job(own, strategy, args.np, *options).end()
        whole, killed = everything_in(folder / strategy / "whole"), everything_in(own)
        same = whole[1].keys() == killed[1].keys() and whole[2] == killed[2]
        same = same and all(array.tobytes() == killed[1][key].tobytes() for key, array in whole[1].items())
        lines = set(LINES.findall(printed)) == set(LINES.findall(undisturbed))
        print(
            f"{strategy}, {args.np} ranks: killed {landed} times, went on {printed.count('Going on')} times; "
            f"{len(whole[1])} arrays at step {killed[0].step}: {'the same bits' if same else 'DIFFERENT'}; "
            f"lines: {'the same' if lines else 'DIFFERENT'}; accuracy {ACCURACY.findall(printed)[-1]}",
            flush=True,
        )
        if not (same and lines and landed == args.kills):
            raise SystemExit(1)


# -- other numbers of ranks -------------------------------------------------------------------------------------------
def ranks(args: argparse.Namespace, folder: Path) -> None:
    for strategy in args.strategies:
        finals = []
        for seed in range(args.seeds):
            options = [*options_of(args), "--seed", str(seed)]
            two = ACCURACY.findall(Job(folder / f"{strategy} {seed} two", strategy, 2, *options).end())[-1]
            own = folder / f"{strategy} {seed} changing"
            for world_size in (2, 3):
                job = Job(own, strategy, world_size, *options)
                steps = args.epochs * (args.images // 64) // 3 // world_size  # a third of all images
                job.wait_for_step(newest_step(own) + steps)
                job.kill()
            changing = ACCURACY.findall(Job(own, strategy, 2, *options).end())[-1]
            finals.append((float(two), float(changing)))
            print(f"{strategy}, seed {seed}: 2 ranks {two}, 2 -> 3 -> 2 ranks {changing}", flush=True)
        two, changing = np.mean(finals, axis=0)
        print(
            f"{strategy}: mean of {args.seeds} seeds {two:.4%} and {changing:.4%}, {100 * (changing - two):+.3f} points"
        )


def options_of(args: argparse.Namespace) -> list[str]:
    options = ["-m", str(args.epochs), "--checkpoint-every", str(args.every)]
    return options if args.data_dir is None else [*options, "--data-dir", args.data_dir]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "ranks"])
    parser.add_argument("--np", type=at_least(1), default=2, metavar="N", help="ranks (kills; 2)")
    parser.add_argument("--kills", type=at_least(1), default=10, metavar="N", help="(10)")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="(kills; 0)")
    parser.add_argument("--seeds", type=at_least(1), default=3, metavar="N", help="(ranks; 3)")
    parser.add_argument("--epochs", type=at_least(1), default=1, metavar="N", help="(1)")
    parser.add_argument("--every", type=at_least(1), default=10, metavar="N", help="steps between checkpoints (10)")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--data-dir", help="folder with MNIST's four files")
    parser.add_argument("--images", type=at_least(1), default=60_000, metavar="N", help="to train on there (60000)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        {"kills": kills, "ranks": ranks}[args.what](args, Path(temporary))


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:  # strategy, number of ranks, options of the example
        launch.main(train, int(sys.argv[3]), (sys.argv[2], sys.argv[4:]))
    else:
        main()
