"""Codecs as a communication hook of DDP."""

# Without `from __future__ import annotations`, since DDP compares the annotations of a hook with classes.

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ... import codecs
from ...codecs import Codec
from ...engine.engine import DEFAULT_BUCKET_ELEMENTS, Engine, NonFinite
from ...engine.step import GradientCounter
from ...errors import UsageError
from ..ddp.plain_model import plain_model
from ..private import call_after_backward, foreach_copy
from .averaging import Averaging, engine_of
from .gpu import on_current_stream
from .parameters import TrainedParameter, trained_parameters, views_of


class _Taken(NamedTuple):
    """A bucket of DDP.

    Attributes:
        bucket: the bucket.
        future: of its means.
        params: the parameters in it.
    """

    bucket: dist.GradBucket
    future: Future[torch.Tensor]
    params: list[TrainedParameter]

    def gradients(self) -> list[torch.Tensor]:
        """Views of the gradients of its parameters."""
        buffer = self.bucket.buffer()
        begin = buffer.storage_offset()
        places = [(grad.storage_offset() - begin, grad.numel()) for grad in self.bucket.gradients()]
        rows = [buffer[start : start + count] for start, count in places]
        return [param.from_memory(row) for param, row in zip(self.params, rows, strict=True)]


class CodecHook(Averaging):
    """The state of a hook: the engine that averages gradients, with its residuals and statistics.

    DDP's buckets only bring gradients. They are copied to buckets of the engine in wire memory, which are encoded and
    sent as soon as they are full, and the means are copied back when the last gradient is final. So residuals do not
    depend on the layout of DDP's buckets, which changes after the first step. DDP's buckets end elsewhere, have no
    gaps, and often another order. One memory for both would need the engine's buckets laid out anew in DDP's order:
    TopK would select other elements than in DistOpt, and others after a restart.
    """

    def __init__(self, params: list[TrainedParameter], *args: Any) -> None:
        """Local. As `Averaging`."""
        super().__init__(params, *args)
        self._param_of = {id(param.tensor): param for param in params}
        self._taken: list[_Taken] = []

    def __deepcopy__(self, _: object) -> Any:
        """Local. Itself: a copy of DDP, such as that of AveragedModel, keeps the state of its hook, but no hook."""
        return self

    def __getstate__(self) -> Any:
        raise UsageError("the state of DDP's hook cannot be pickled; save the model inside of DDP, and its state_dict")

    @on_current_stream
    def take(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Collective. What DDP calls with each bucket; the future ends with the last bucket of the backward pass."""
        # Without its device, a future makes no stream wait for the result.
        buffer = bucket.buffer()
        future: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if self._shards is not None and self._shards.idles:
            future.set_result(buffer)
            return future
        if bucket.index() == 0:
            self._taken.clear()  # of a backward pass that an exception has ended
            self._step = self._begun()
        step = self._step
        assert step is not None
        with step:
            taken = _Taken(bucket, future, self._params_in(bucket))
            self._taken.append(taken)
            views = views_of(step.layout)
            foreach_copy([views[id(param)] for param in taken.params], taken.gradients())
            for param in taken.params:
                step.final(param)
            if bucket.is_last():
                self._finish(step)
        return future

    def _params_in(self, bucket: dist.GradBucket) -> list[TrainedParameter]:
        """The parameters of a bucket."""
        if others := sum(id(tensor) not in self._param_of for tensor in bucket.parameters()):
            raise UsageError(
                f"DDP trains {others} parameters of another model; make the hook of the model inside of DDP"
            )
        params = [self._param_of[id(tensor)] for tensor in bucket.parameters()]
        if bucket.buffer().is_sparse:
            raise UsageError(
                f"the gradient of {params[0].name} is sparse, and codecs send dense ones; make its layer with "
                "sparse=False, or wrap the optimizer in distopt.torch.DistOpt, which makes gradients dense"
            )
        return params

    def _begun(self) -> GradientCounter:
        for param in self._params:
            param.check_order()
        return super()._begun()

    def _finish(self, step: GradientCounter) -> None:
        """Collective. Hand the means to DDP."""
        taken, self._taken = self._taken, []
        verdict, views = self._verdict(step), views_of(step.layout)
        if verdict is not None:
            # After DDP's own callback, which it queues behind the last bucket: else it takes no further backward pass.
            call_after_backward(lambda: call_after_backward(lambda: self._engine.refuse(verdict)))
        for each in taken:
            foreach_copy(each.gradients(), [views[id(param)] for param in each.params])
            each.future.set_result(each.bucket.buffer())


def hook(
    model: torch.nn.Module,
    codec: Codec | str = "fp32",
    *,
    group: dist.ProcessGroup | None = None,
    bucket_elements: int = DEFAULT_BUCKET_ELEMENTS,
    non_finite: NonFinite = "raise",
    shards: int | None = None,
    seed: int = 0,
    via_host: bool = False,
    **options: Any,
) -> tuple[CodecHook, Any]:
    """Collective. A hook by which DDP averages its gradients through a codec.

        model = DistributedDataParallel(model)
        model.register_comm_hook(*distopt.torch.hook(model, "top-k", ratio=0.01, error_feedback=True))

    Args:
        model: the model inside of DDP, or DDP itself; residuals and errors have the names of its parameters.
        codec: a codec, or the name of one, see `distopt.codecs.create`.
        group: the ranks, over any backend (default: those of DDP's group; of a model that is not in DDP yet, all).
        bucket_elements: bucket size in elements, see `distopt.engine.layout.plan`.
        non_finite: what to do about a gradient that is NaN or infinite on any rank: "raise" a GradientError on all
            ranks from `backward`, or "ignore" it, which only fp32 can.
        shards: see `distopt.torch.DistOpt`; then `model` is DDP itself, and the state has `shards`, too.
        seed: see `distopt.torch.DistOpt`.
        via_host: see `distopt.torch.DistOpt`.
        options: of the codec if it is given by name.

    Returns:
        The two arguments of `register_comm_hook`: the hook's state, with `stats`, `state_dict` and `load_state_dict`,
        and the function.

    Raises:
        UsageError: an option is wrong, or a parameter is not one that codecs reduce.
    """
    codec = codecs.create(codec, **options) if isinstance(codec, str) else codecs.codec_of(codec)
    if non_finite == "skip":
        raise UsageError("DDP's hook cannot skip the update of an optimizer; use distopt.torch.DistOpt for that")
    Engine.check_options(non_finite)
    plain, ddp = plain_model(model)
    if shards is not None and ddp is None:
        raise UsageError(f"DDP leaves all shards but the last to the hook; pass DDP itself, hook(ddp, shards={shards})")
    params = trained_parameters(plain.named_parameters())
    engine = engine_of(
        params, _group_of(ddp, group), non_finite, shards=shards, seed=seed, model=model, via_host=via_host
    )
    return CodecHook(params, engine, codec, bucket_elements), CodecHook.take


def _group_of(ddp: DistributedDataParallel | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group to average over: that of DDP, or another one of the same ranks."""
    if ddp is None or group is None:
        return group if ddp is None else ddp.process_group
    if (ranks := dist.get_process_group_ranks(ddp.process_group)) != dist.get_process_group_ranks(group):
        raise UsageError(f"DDP averages over the ranks {ranks}, and group= has others; pass a group of these, or none")
    return group
