r"""A language model trained by several ranks on CPUs, over fast and slow links, in many ways.

    distopt run --nproc-per-node 2 examples/pytorch/language/train.py
    distopt run --nproc-per-node 2 examples/pytorch/language/train.py --way sparse-loco --steps 300 --save model.pt
    distopt run --nproc-per-node 2 examples/pytorch/language/train.py --model smollm2 --way sparse-loco

`tiny` has a million parameters and reads bytes; `smollm2` continues to train SmolLM2-135M-Instruct. The ways: DDP, with
PyTorch's own hooks (ddp-...) or ours (hook-...), and DiLoCo.

Workers that come and go, on any number of nodes; a lost one ends no other:

    distopt run --heal --workers node --nnodes 1:8 --rdzv-endpoint HOST:29400 \
        examples/pytorch/language/train.py --way sparse-loco --min-workers 1

Samples are drawn by seed, worker and step, and a step has no other randomness: no rank has states of its own to save.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from model import TINY, LanguageModel, loss_of, validation_loss
from text import Text, bytes_of, verses
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import distopt.torch
from distopt import codecs

# Registers a hook at DDP.
Hook = Callable[[DistributedDataParallel], Any]


def power_sgd(ddp: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def ours(codec: str, **options: Any) -> Hook:
    return lambda ddp: ddp.register_comm_hook(*distopt.torch.hook(ddp, codec, **options))


HOOKS: dict[str, Hook] = {
    "ddp": lambda _: None,
    "ddp-fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "ddp-power-sgd": power_sgd,
    "hook-fp16": ours("fp16"),
    "hook-4-bit": ours("quantized", bits=4, error_feedback=True),
    "hook-top-k": ours("top-k", ratio=0.01, error_feedback=True),
    "hook-chunked-top-k": ours("chunked-top-k", k=64, bits=2, error_feedback=True),
}


@dataclass(frozen=True)
class Local:
    """A DiLoCo: how it sends changes, its outer optimizer (Nesterov's momentum), and in how many fragments.

    `rate` is the outer learning rate, for all models or for each. Several fragments are averaged in turn; training
    continues for half of the time to the next one.
    """

    codec: codecs.Codec
    rate: float | dict[str, float] = 0.7
    momentum: float = 0.9
    fragments: int = 1
    sync_every: int = 30

    def rate_of(self, model: str) -> float:
        return self.rate[model] if isinstance(self.rate, dict) else self.rate

    def start(
        self, model: nn.Module, inner: torch.optim.Optimizer, rate: float, sync_every: int, **options: Any
    ) -> distopt.torch.DiLoCo:
        outer = torch.optim.SGD(model.parameters(), rate, self.momentum, nesterov=self.momentum > 0)
        if self.fragments > 1:
            options["fragment_sync_delay"] = sync_every // self.fragments // 2
            options["fragment_update_alpha"] = 0.5
        options |= {"codec": self.codec, "fragments": self.fragments}
        return distopt.torch.DiLoCo(model, inner, outer, sync_every=sync_every, **options)


LOCAL = {
    "diloco": Local(codecs.create("fp32")),
    "diloco-top-k": Local(codecs.create("top-k", ratio=0.05, error_feedback=True)),
    "diloco-4-bit": Local(codecs.create("quantized", bits=4)),
    "diloco-streams": Local(codecs.create("quantized", bits=4), fragments=3),
    "sparse-loco": Local(
        codecs.create("chunked-top-k", k=64, bits=2, error_feedback=True, decay=0.95),
        # Few of a pretrained model's parameters move far in few averages, where AdamW would move all of them a little.
        rate={"tiny": 1.0, "smollm2": 8.0},
        momentum=0.0,
        sync_every=10,
    ),
}


def prepared(name: str, seed: int) -> tuple[LanguageModel, torch.Tensor]:
    """The model of that name, and the text in its tokens."""
    if name == "tiny":
        torch.manual_seed(seed)
        return LanguageModel(TINY), bytes_of(verses())
    import smollm2

    return smollm2.load(), torch.tensor(smollm2.tokenizer().encode(verses()).ids)


def options(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "smollm2"], default="tiny")
    parser.add_argument("--way", choices=[*HOOKS, *LOCAL], default="ddp")
    parser.add_argument("--backend", choices=["distopt", "gloo"], default="distopt", help="of the process group")
    parser.add_argument("--steps", type=int, default=300, help="(300)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per rank and step (8)")
    parser.add_argument("--learning-rate", type=float, help="of AdamW (tiny: 0.003, smollm2: 0.00003)")
    parser.add_argument("--outer-rate", type=float, help="of DiLoCo (0.7; sparse-loco: 1, with smollm2 8)")
    parser.add_argument("--sync-every", type=int, help="steps from one average to the next (30; sparse-loco: 10)")
    parser.add_argument("--min-workers", type=int, help="of a job by --workers: fewer wait for others")
    parser.add_argument("--test-every", type=int, default=30, metavar="STEPS", help="(30)")
    parser.add_argument("--test-samples", type=int, default=128, metavar="N", help="(128)")
    parser.add_argument("--seed", type=int, default=1, help="of parameters and samples (1)")
    parser.add_argument("--checkpoint", metavar="DIR", help="resume from there, and save at each validation")
    parser.add_argument("--tensorboard", metavar="DIR", help="write the losses for TensorBoard")
    parser.add_argument("--save", metavar="FILE", help="write the model at the end, for evaluate.py and serve.py")
    args = parser.parse_args(words)
    if args.min_workers and args.way not in LOCAL:
        parser.error(f"--min-workers is for {', '.join(LOCAL)}")
    return args


class Report:
    """The progress of training: a bar on a terminal, a line for each validation, and TensorBoard."""

    def __init__(self, args: argparse.Namespace, validation: torch.Tensor) -> None:
        from tqdm import tqdm

        self._is_first, self._validation, self._began = dist.get_rank() == 0, validation, time.perf_counter()
        self._bar = tqdm(total=args.steps, unit="step", disable=None if self._is_first else True)
        self._board = None
        if args.tensorboard and self._is_first:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(args.tensorboard)

    def start(self, step: int, model: nn.Module) -> None:
        """Validate, and start the clock."""
        self._bar.update(step)
        self.test(step, model)
        self._began = time.perf_counter()

    def step(self, step: int, loss: float) -> None:
        self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self._bar.update(step - self._bar.n)
        if self._board is not None:
            self._board.add_scalar("loss/training", loss, step)

    def test(self, step: int, model: nn.Module) -> None:
        """On the first rank. Between two averages of a DiLoCo, its model is its own."""
        if not self._is_first:
            return
        loss = validation_loss(model, self._validation)
        self._bar.clear()
        print(f"step {step}: loss {loss:.4f}, {time.perf_counter() - self._began:.1f} s", flush=True)
        if self._board is not None:
            self._board.add_scalar("loss/validation", loss, step)
            self._board.flush()


def train(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """The states of the model at the end, the same on all ranks."""
    model, tokens = prepared(args.model, args.seed)
    text = Text(tokens, args.seed)
    rate = args.learning_rate or {"tiny": 3e-3, "smollm2": 3e-5}[args.model]
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), fused=True)
    net: nn.Module = model
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    stream, local = dist.get_rank(), None
    if args.way in HOOKS or (args.min_workers and dist.get_world_size() > 1):
        net = ddp = DistributedDataParallel(model)
        HOOKS.get(args.way, HOOKS["ddp"])(ddp)
    if args.way in LOCAL:
        sync_every = args.sync_every or LOCAL[args.way].sync_every
        ends = {"averages": -(-args.steps // sync_every), "min_workers": args.min_workers}
        outer_rate = args.outer_rate or LOCAL[args.way].rate_of(args.model)
        local = LOCAL[args.way].start(model, optimizer, outer_rate, sync_every, **ends)
        parts["diloco"] = local
        if args.min_workers:  # every worker has other samples, also one that starts again
            stream += local.worker * dist.get_world_size()
    checkpoint = distopt.torch.Checkpoint(args.checkpoint, every=args.test_every, replicated=local is None, **parts)
    checkpoint.resume()
    counting: Any = checkpoint if local is None else local  # a worker that joins goes on at the others' step
    report = Report(args, text.validation(args.test_samples))
    report.start(counting.steps, model)
    while not (local.finished if local is not None else counting.steps >= args.steps):
        optimizer.zero_grad()
        loss = loss_of(net, text.batch(stream, counting.steps, args.batch_size))
        loss.backward()
        optimizer.step()
        checkpoint.step()
        report.step(counting.steps, loss.item())
        if counting.steps % args.test_every == 0:
            report.test(counting.steps, model)
    checkpoint.close()
    return model.state_dict() if local is None else local.average()


def main() -> None:
    args = options()
    dist.init_process_group(args.backend)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    states = train(args)
    if args.save and dist.get_rank() == 0:
        torch.save(states, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
