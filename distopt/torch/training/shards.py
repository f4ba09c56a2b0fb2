"""Steps in shards for PyTorch: gradients, random numbers and statistics of each; see `distopt.engine.shards`."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

from ...comm.base import Array
from ...engine.shards import RunningStatistics, Shards
from ...engine.step import GradientCounter
from ...errors import UsageError
from ...launch.job.topology import Topology
from ..ddp.bucket_order import Idle
from ..ddp.plain_model import plain_model
from ..ddp.sync_batch_norm import SyncBatchNorm
from ..private import version_of
from ..tensors import array_of
from .parameters import TrainedParameter


class ModelShards(Shards):
    """The shards of the steps of a model.

    Args:
        count: see `Shards`.
        seed: see `Shards`.
        topology: see `Shards`.
        model: with or without DDP around it.

    Attributes:
        unused: what DDP does about a parameter that has no gradient; see `GradientCounter.finish`.

    Raises:
        UsageError: see `Shards`, or a layer has statistics that cannot be cut into shards.
    """

    def __init__(self, count: int, seed: int, topology: Topology, model: torch.nn.Module) -> None:
        super().__init__(count, seed, topology, threads=torch.get_num_threads())
        plain, self._ddp = plain_model(model)
        skips = self._ddp is not None and self._ddp.find_unused_parameters
        self.unused: Literal["raise", "zero"] = "zero" if skips else "raise"
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for name, layer in plain.named_modules():
            if isinstance(layer, (SyncBatchNorm, torch.nn.SyncBatchNorm)):
                raise self.refusal(f"SyncBatchNorm ({name})")
            if getattr(layer, "running_mean", None) is not None:
                self._add_layer(name, layer)

    def parts(
        self,
        batch: Sequence[Any],
        done: Any,
        params: Sequence[TrainedParameter],
        begin: Callable[[], GradientCounter],
        unused: Literal["raise", "zero"],
    ) -> Iterator[Any]:
        """Collective with the steps in it. As `walk`, with the random numbers and gradients of each shard.

        Args:
            batch: see `walk`.
            done: see `walk`.
            params: of the model.
            begin: begins a step, or gives the one that awaits the next shard.
            unused: see `Shards.fold`, which takes the gradients of each shard but the last.
        """

        @contextlib.contextmanager
        def around(seed: Sequence[int]) -> Iterator[None]:
            precedes_last = self.precedes_last
            for param in params:
                # DDP asks for a gradient of each parameter that any shard has used.
                param.tensor.grad = torch.zeros_like(param.tensor) if self.unused == "zero" else None
            kept = torch.get_rng_state()
            torch.default_generator.manual_seed(_number_of(seed))
            try:
                with self._without_ddp() if precedes_last else contextlib.nullcontext():
                    yield
            finally:
                torch.set_rng_state(kept)
            if precedes_last:
                grads = {id(param): param.array_like(param.tensor.grad) for param in params if self._has_grad(param)}
                if grads:  # else the turn had no backward pass
                    with begin() as step:
                        self.fold(step, grads, unused)

        return map(_aligned, self.walk(batch, done, around))

    def _has_grad(self, param: TrainedParameter) -> bool:
        grad = param.tensor.grad
        return grad is not None and (self.unused == "raise" or version_of(grad) > 0)

    def _without_ddp(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._ddp is None else self._ddp.no_sync()

    @property
    def idles(self) -> bool:
        """Local. Whether DDP only lays out its buckets, for a job that resumes."""
        return self._ddp is not None and isinstance(self._ddp.module, Idle)

    def close(self) -> None:
        """Local. Let layers update their running statistics at once again."""
        for handle in self._handles:
            handle.remove()

    def _add_layer(self, name: str, layer: Any) -> None:
        """Local. Note what each batch adds to the running statistics of a layer, and leave them alone until the end."""
        if layer.momentum is None:
            raise UsageError(f"{name} takes cumulative averages, momentum=None; with shards= give it a momentum")
        if layer.running_mean.dtype not in (torch.float32, torch.float64):
            raise UsageError(f"{name} has running statistics of {layer.running_mean.dtype}; keep them in float32")
        kept: list[tuple[Array, Array]] = []

        def arrays() -> tuple[Array, Array]:
            return array_of(layer.running_mean), array_of(layer.running_var)

        def passed(batches: int) -> None:
            layer.num_batches_tracked += batches

        running = self.add_statistics(layer, RunningStatistics(arrays, layer.momentum, passed))

        # By arrays, since autograd refuses a backward pass after a tensor operation has changed what it saved.
        def before(module: torch.nn.Module, *_: Any) -> None:
            if module is layer and layer.training and running.waits:  # copies of a layer share its hooks
                kept.append((arrays()[0].copy(), arrays()[1].copy()))
                for array in arrays():
                    array.fill(0)

        def after(*_: Any) -> None:
            if kept:
                for note, array, old in zip(running.note(), arrays(), kept.pop(), strict=True):
                    note[...], array[...] = array, old
                layer.num_batches_tracked -= 1

        self._handles.append(layer.register_forward_pre_hook(before))
        self._handles.append(layer.register_forward_hook(after, always_call=True))


def _number_of(seed: Sequence[int]) -> int:
    """64 bits, which differ between seeds."""
    return int.from_bytes(hashlib.blake2b(repr(seed).encode(), digest_size=8).digest(), "little")


def _aligned(part: Any) -> Any:
    """A part in memory of its own: the order of some sums, as in MKL, depends on where a matrix begins."""
    if isinstance(part, tuple):
        return tuple(map(_aligned, part))
    return part.clone() if isinstance(part, torch.Tensor) else part
