"""Real jobs that are killed, and jobs that go on with another number of ranks: the example on MNIST.

    python benchmarks/checkpoint_runs.py kills --kills 10 --epochs 1

ends each strategy's job by SIGKILL at random moments, starts it again each time, and compares all that it has saved at
its end, and all that it has printed, with a job that ran undisturbed: to the bit.

    python benchmarks/checkpoint_runs.py ranks --seeds 3 --epochs 6

trains with 2 ranks, from a third of the steps on with 3, and from two thirds on with 2 again, and compares the accuracy
at the end with that of 2 ranks.
"""

from __future__ import annotations

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

from distopt import launch, opt, singa_wrap
from distopt.checkpoint.folder import Manifest, list_checkpoints, read_manifest, read_rank, read_shared

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train_cnn

CODECS = {"power-sgd": "power-sgd"}  # of DistOpt(codec=...); the others are values of dist_option
STRATEGIES = ["plain", "half", "bf16", "partialUpdate", "sparseTopK", "sparseThreshold", *CODECS]
STEPS_PER_EPOCH = 468  # of two ranks
ACCURACY = re.compile(r"Evaluation accuracy = (\S+),")
LINES = re.compile(r"Training loss = .*\nEvaluation accuracy = [^,]*")


class WithCodec(opt.DistOpt):
    def step_by(self, dist_option, loss, **_) -> None:
        self(loss)


def train(rank: int, world_size: int, ticket, strategy: str, options: list[str]) -> None:
    momentum = {"lr": 0.005, "momentum": 0.9, "weight_decay": 1e-5}
    codec = CODECS.get(strategy)
    cls = opt.DistOpt if codec is None else WithCodec
    sgd = cls(opt.SGD(**momentum), ticket, rank, world_size, codec=codec or "fp32", partition_elements=100_000)
    train_cnn.run(sgd, train_cnn.parse_args("", [*options, "-d", "fp32" if codec else strategy]))


class Job:
    """The job as a process, with its checkpoints in `folder`."""

    def __init__(self, folder: Path, strategy: str, world_size: int, *options: str) -> None:
        command = [sys.executable, __file__, "job", strategy, str(world_size), "--checkpoint", str(folder), *options]
        self.folder = folder
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

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
        options = ["-m", str(args.epochs), "--seed", str(args.seed), "--checkpoint-every", str(args.every)]
        undisturbed = Job(folder / strategy / "whole", strategy, args.np, *options).end()
        own = folder / strategy / "killed"
        steps = STEPS_PER_EPOCH * 2 // args.np * args.epochs
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
            options = ["-m", str(args.epochs), "--seed", str(seed), "--checkpoint-every", str(args.every)]
            two = ACCURACY.findall(Job(folder / f"{strategy} {seed} two", strategy, 2, *options).end())[-1]
            own = folder / f"{strategy} {seed} changing"
            for world_size in (2, 3):
                job = Job(own, strategy, world_size, *options)
                steps = args.epochs * STEPS_PER_EPOCH * 2 // 3 // world_size  # a third of all images
                job.wait_for_step(newest_step(own) + steps)
                job.kill()
            changing = ACCURACY.findall(Job(own, strategy, 2, *options).end())[-1]
            finals.append((float(two), float(changing)))
            print(f"{strategy}, seed {seed}: 2 ranks {two}, 2 -> 3 -> 2 ranks {changing}", flush=True)
        two, changing = np.mean(finals, axis=0)
        print(
            f"{strategy}: mean of {args.seeds} seeds {two:.4%} and {changing:.4%}, {100 * (changing - two):+.3f} points"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        _, _, strategy, world_size, *options = sys.argv
        launch.main(train, int(world_size), (singa_wrap.NcclIdHolder(), strategy, options))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "ranks"])
    parser.add_argument("--np", type=int, default=2, help="ranks (kills)")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="(kills)")
    parser.add_argument("--seeds", type=int, default=3, help="(ranks)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        {"kills": kills, "ranks": ranks}[args.what](args, Path(temporary))
