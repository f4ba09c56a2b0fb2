"""DistOpt for PyTorch: an optimizer whose gradients are averaged over the ranks during the backward pass."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from ... import codecs
from ...checks import check_number
from ...codecs import Codec
from ...engine.engine import DEFAULT_BUCKET_ELEMENTS, DEFAULT_CHECK_EVERY, Engine, NonFinite
from ...engine.layout import Layout
from ...engine.step import GradientCounter
from ...errors import UsageError
from ..ddp.plain_model import plain_model
from ..private import call_after_backward, current_autograd_node, current_backward_pass, is_nested_backward
from .averaging import Averaging, engine_of
from .gpu import current_stream, on_current_stream
from .parameters import (
    GradientHook,
    HeldParameters,
    TrainedParameter,
    arrays_in,
    check_plain,
    is_in_ddp,
    send_first,
    unused_on_all,
    views_of,
)


class DistOpt(Averaging, torch.optim.Optimizer):
    """Wraps an optimizer, for a model without DDP: after `backward`, gradients are the means over the ranks.

    Gradients are sent during the backward pass. When `backward` returns, `.grad` of each parameter is its mean,
    so clipping and `step` work as in a script of one process. It is a `torch.optim.Optimizer` that shares
    groups and states with the wrapped one, so schedules take it. The parameters of rank 0 replace those of all ranks,
    also those that the optimizer does not train, such as a frozen backbone; and, with `model`, so do its buffers.

    Each step has one backward pass outside of `no_sync`, and uses the same parameters. Sparse gradients become dense.
    The next pass overwrites the memory of `.grad`: clone what is to be kept. Parameters may be frozen and thawed.

    Args:
        optimizer: the optimizer to wrap.
        named_parameters: `model.named_parameters()`; the names are for errors and saved states (default: those of
            `model`, else numbers).
        group: the ranks, over any backend (default: all).
        codec: how gradients are encoded: a codec, or the name of one (see `distopt.codecs`).
        bucket_elements: bucket size in elements, see `distopt.engine.layout.plan`.
        partition_elements: if given, steps are partial updates: each rank applies its own gradients, and then one
            partition of that size is averaged over the ranks.
        non_finite: what to do about a gradient that is NaN or infinite on any rank. "raise" a GradientError on all
            ranks from `backward`; "skip" the next `step` on all ranks, with a warning; "ignore" it, which only fp32
            can.
        clip: limit every element of a gradient to [-clip, clip] before it is sent.
        clip_grad_norm: limit the l2 norm of the averaged gradient, when `step` is called.
        check_every: compare the parameters of all ranks, bit by bit, before the first step and then every
            `check_every` steps, and raise a MismatchError on all ranks if one differs; 0: never.
        find_unused_parameters: whether a parameter that the loss of a rank does not reach adds what its `.grad` holds,
            or zero, instead of raising an error. If the loss of no rank reaches it, `.grad` stays as it is, but
            for `shards` and `join`.
        shards: cut each step into so many shards, whatever the number of ranks: parameters, running statistics and
            states then have the same bits for any number of ranks, see `shards`. At least the number of ranks; on CPUs.
        seed: of the random numbers in shards, such as those of dropout.
        model: the model that is trained, for its names and buffers; `shards` need it for running statistics.
        via_host: for parameters on GPUs: gradients are encoded there, and what is sent travels through pinned memory of
            the host by the CPUs' transport. Without it, it travels by NCCL.

    Raises:
        UsageError: an option is wrong, or a parameter is not one that codecs reduce.
        MismatchError: the ranks train different models.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        codec: Codec | str = "fp32",
        bucket_elements: int = DEFAULT_BUCKET_ELEMENTS,
        partition_elements: int | None = None,
        non_finite: NonFinite = "raise",
        clip: float | None = None,
        clip_grad_norm: float | None = None,
        check_every: int = DEFAULT_CHECK_EVERY,
        find_unused_parameters: bool = False,
        shards: int | None = None,
        seed: int = 0,
        model: torch.nn.Module | None = None,
        via_host: bool = False,
    ) -> None:
        """Collective."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"DistOpt wraps an optimizer, such as torch.optim.SGD(parameters), not {optimizer!r}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError("LBFGS computes several gradients in a step; use it with DDP, or choose another optimizer")
        if clip_grad_norm is not None:
            check_number("clip_grad_norm", clip_grad_norm, "(0, inf]")
        Engine.check_options(non_finite, check_every)
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.partition_elements, self.clip, self.clip_grad_norm = partition_elements, clip, clip_grad_norm
        codec = codecs.codec_of(codec)
        plain, ddp = plain_model(torch.nn.Module() if model is None else model)
        if named_parameters is None and model is not None:
            named_parameters = plain.named_parameters()
        trained, others = _named(optimizer, named_parameters)
        params = [TrainedParameter(name, tensor) for name, tensor in trained]
        if ddp is not None or all(name.startswith("module.") for name, _ in trained):
            _check_no_ddp(params)
        if shards is not None and model is None:
            raise UsageError(f"shards need the model, for running statistics; pass model=model, shards={shards}")
        check_every = 0 if partition_elements else check_every
        engine = engine_of(
            params, group, non_finite, check_every, shards=shards, seed=seed, model=model, via_host=via_host
        )
        engine.partial.keeps_gradients = True  # in `.grad`
        super().__init__(params, engine, codec, bucket_elements, optimizer)
        self._unused = "zero" if find_unused_parameters else "raise"
        with current_stream(self.device):
            engine.agreement.attach(params)
            send_first(engine.communicator, [*others, *plain.named_buffers()])
        self._held = HeldParameters(plain, params)
        self._layout: Layout | None = None  # of the last step
        self._pass = -1  # number of the backward pass of this step
        self._collects = False  # inside `no_sync`
        self._averaged: Literal["yes", "no", "partly"] = "no"  # whether gradients are means since the last `step`
        self._warned = False  # of a step without gradients
        self._skips = False  # whether the next `step` leaves the parameters alone
        self._hooks = [GradientHook(param, weakref.WeakMethod(self.take)) for param in params]
        _open.add(self)
        super().__setstate__({})  # hooks of the base class; states and groups are those of the wrapped optimizer

    # -- the interface of optimizers -----------------------------------------------------------------------------------
    @property
    def param_groups(self) -> Any:
        """Local. The groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """Local. The states of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def parameters_agree(self) -> bool:
        """Local. Whether parameters and states are known to be the same on all ranks, as with shards."""
        return self._shards is not None

    def __getstate__(self) -> Any:
        raise UsageError("a DistOpt cannot be copied or pickled; save its state_dict")

    @on_current_stream
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective with partial updates, else local. Update the parameters; returns the value of `closure`.

        Raises:
            UsageError: there are gradients that have not been averaged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._step is not None:
            self._finish()
        averaged, self._averaged = self._averaged, "no"
        if self._skips:
            self._skips = False
        else:
            if averaged != "yes":
                self._check_averaged(averaged)
            self._update()
            if self.partition_elements is not None and self._layout is not None:
                self._engine.partial.average(self._layout)
        return loss

    def _check_averaged(self, averaged: Literal["no", "partly"]) -> None:
        self._check_parameters()
        self._held.check()
        views = {} if self._layout is None or averaged == "partly" else views_of(self._layout)
        for param in self._params:
            grad, view = param.tensor.grad, views.get(id(param))
            if grad is None or (view is not None and param.has_grad_in(view)) or not (grad.is_sparse or grad.any()):
                continue
            if averaged == "partly":
                raise UsageError(
                    f"the gradient of {param.name} has been added up inside of no_sync, but not averaged over the "
                    "ranks; run the last backward pass before step outside of no_sync, or drop it by zero_grad"
                )
            raise UsageError(
                f"the gradient of {param.name} comes from no backward pass since the last step, so it has not been "
                "averaged over the ranks; call backward, or, if it is the same on all ranks, step the wrapped "
                "optimizer, DistOpt.optimizer"
            )
        if not self._warned and all(param.tensor.grad is None for param in self._params):
            self._warned = True
            if self._engine.communicator.topology.rank == 0:
                _log.warning(
                    "step has no gradient of any parameter, so it changes nothing; if the model's parameters have been "
                    "replaced, as by load_state_dict(assign=True), make the optimizer anew"
                )

    @on_current_stream
    def state_dict(self) -> dict[str, Any]:
        """Local. The states of the wrapped optimizer, and `engine`: residuals of this rank, and counts."""
        return {**self.optimizer.state_dict(), **super().state_dict()}

    def unshared_state_dict(self) -> dict[str, Any]:
        """Local. The part of `state_dict` that changes elsewhere than in the update: `engine`."""
        return super().state_dict()

    @on_current_stream
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Local. Resume from the result of `state_dict` on the same rank of a job of the same size.

        Raises:
            StateError: the states do not fit.
        """
        self._engine.check_states(arrays_in(state_dict, self._params))
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "engine"})
        super().load_state_dict(state_dict)

    # -- steps -------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Local. In the body of a `with`, backward passes only add to `.grad`; the next one outside sends the sums.

        With shards, use it around the passes of one shard only.
        """
        if self._shards is not None and self._shards.current is None:
            raise self._shards.refusal("no_sync around shards")
        self._collects = True
        try:
            yield
        finally:
            self._collects = False

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Collective. Let ranks take different numbers of steps in the body of a `with`.

        A rank that leaves the body contributes zeros to the steps of the others, and applies the same updates. A step
        averages over the ranks that still have data. For codecs without error feedback; every rank has a batch.

        Raises:
            UsageError: a rank had no batch, or a step is of a kind that cannot be taken without all ranks.
        """

        def update(layout: Layout) -> None:
            self._give(layout, set())
            self._update()
            self._averaged = "no"

        with current_stream(self.device), self._engine.join(self._rule, update):
            yield

    @on_current_stream
    def synchronize(self) -> None:
        """Collective. Make the parameters of all ranks equal to their mean, where partial updates let them differ."""
        self._engine.partial.synchronize()

    def close(self) -> None:
        """Local. Leave gradients alone from now on, for example before another DistOpt wraps the same parameters."""
        _open.discard(self)
        for hook in self._hooks:
            hook.remove()
        if self._shards is not None:
            self._shards.close()

    def take(self, param: TrainedParameter, tensor: torch.Tensor) -> None:
        """Collective, in a backward pass, for the hooks of parameters: take a gradient, which is final."""
        if self._collects:
            self._averaged = "partly"
            return
        if self._shards is not None and self._shards.precedes_last:
            return
        number = current_backward_pass()
        if current_autograd_node() is None:
            raise UsageError(
                "compiled autograd calls nothing at the end of a backward pass, when gradients are averaged; leave "
                "torch._dynamo.config.compiled_autograd False, and compile the model only"
            )
        if self._step is not None and number > self._pass and not is_nested_backward():
            if tensor.grad is not None:
                tensor.grad = tensor.grad.clone()  # may lie in a bucket that `_leave` overwrites
            self._leave(but=param)
        if self._step is None:
            with current_stream(self.device):
                self._step = self._begun()
            self._layout, self._skips = self._step.layout, False
        if number != self._pass:
            self._pass = number
            call_after_backward(self._finish)
        assert self._step is not None
        view, grad = views_of(self._step.layout)[id(param)], tensor.grad
        # Only what fills a bucket, or fails, computes by CuPy.
        computes = grad is None or grad.requires_grad or self._step.fills(param)
        with current_stream(self.device) if computes else contextlib.nullcontext(), self._step:
            if grad is None:
                raise UsageError(
                    f"a hook has dropped the gradient of {param.name} before it was averaged; gradients are means when "
                    "backward returns: take steps and drop gradients there"
                )
            if not param.has_grad_in(view):
                check_plain(grad)
                view.copy_(grad.to_dense() if grad.is_sparse else grad)
                param.give(view)
            self._step.final(param)

    def _begun(self) -> GradientCounter:
        self._check_parameters()
        if self._layout is None:
            _check_no_ddp(self._params)
            self._check_alone()
        engine, rule = self._engine, self._rule
        version = int.from_bytes(bytes(param.tensor.requires_grad for param in self._params), "big")
        if self.partition_elements is not None:
            return engine.begin_partial(self.partition_elements, self._order, rule, version=version)
        return engine.begin(self.codec, self.bucket_elements, self._order, rule, version=version, clip=self.clip)

    def _check_parameters(self) -> None:
        """Local. Scripts replace and convert parameters; the hooks are those of the old ones."""
        own = {id(param.tensor) for param in self._params}
        if {id(tensor) for group in self.param_groups for tensor in group["params"]} != own:
            raise UsageError(
                "the optimizer has other parameters than when it was wrapped; close() this, and wrap it anew"
            )
        for param in self._params:
            param.check_unconverted()

    def _check_alone(self) -> None:
        names = {id(param.tensor): param.name for param in self._params}
        for other in _open - {self}:
            for param in other._params:
                if (name := names.get(id(param.tensor))) is not None:
                    raise UsageError(f"parameter {name} is averaged by another DistOpt, too; call close() of that one")

    def _order(self) -> list[TrainedParameter]:
        return [param for param in super()._order() if param.tensor.requires_grad]

    @on_current_stream
    def _leave(self, but: TrainedParameter) -> None:
        """Collective. An exception has ended the backward pass of the step: drop its gradients; `but` has a new one."""
        step, self._step = self._step, None
        assert step is not None
        for param in self._params:
            if param is not but:
                param.tensor.grad = None
        step.abandon("the backward pass was not completed")

    @on_current_stream
    def _finish(self) -> None:
        """Collective, at the end of a backward pass. End the step, unless the pass runs inside another one."""
        step = self._step
        if step is None or (not step.is_complete and is_nested_backward()):
            return
        self._step = None
        if not step.is_complete:
            with step:
                self._held.check()
        try:
            with step:
                unused = self._take_unused(step)
                verdict = self._verdict(step, self._unused)
        except UsageError as error:
            raise UsageError(f"{error}, or pass find_unused_parameters=True") from None
        if verdict is not None:
            self._skips = True
            self._engine.refuse(verdict)
            return
        self._give(step.layout, unused)

    def _take_unused(self, step: GradientCounter) -> set[int]:
        """Collective. Take what earlier passes have left to the parameters that this one has not reached; their ids."""
        if self._unused == "raise" or self._shards is not None:
            return set()
        awaited = [param for param in self._params if step.awaits(param)]
        for param in awaited:
            if (grad := param.tensor.grad) is not None:
                views_of(step.layout)[id(param)].copy_(grad.to_dense() if grad.is_sparse else grad)
                step.final(param)
        return {id(param) for param in awaited}

    def _give(self, layout: Layout, unused: set[int]) -> None:
        """Collective if parameters may be unused, else local. Set `.grad` of each parameter to its mean.

        Args:
            layout: the buckets with the means.
            unused: the parameters, by id, that no pass of this rank has reached; if none of any rank has, and no
                residual was sent, they keep their gradients.
        """
        self._averaged = "yes"
        views = views_of(layout)
        if self._unused == "zero" and self._shards is None and not self._engine.is_joining:
            if self.partition_elements is None:
                unused = unused_on_all(self._engine.communicator, layout, unused)
            views = {key: view for key, view in views.items() if key not in unused or view.any()}
        for param in self._params:
            if (view := views.get(id(param))) is not None:
                param.give(view)

    def _update(self) -> None:
        """Local. Limit the norm of the gradients, which a GradScaler has unscaled by now, and step."""
        if self.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([param.tensor for param in self._params], self.clip_grad_norm)
        self.optimizer.step()


_log = logging.getLogger("distopt")
_open: weakref.WeakSet[DistOpt] = weakref.WeakSet()


def _check_no_ddp(params: list[TrainedParameter]) -> None:
    if is_in_ddp(params):
        raise UsageError("DDP averages the gradients of this model itself; use hook(ddp, codec), or del ddp first")


def _named(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> tuple[list[tuple[str, torch.nn.Parameter]], list[tuple[str, torch.nn.Parameter]]]:
    """The parameters of an optimizer with their names, and the other ones of its model."""
    own = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if named is None:
        return [(f"parameter {place}", tensor) for place, tensor in enumerate(own)], []
    found = {id(tensor): (name, tensor) for name, tensor in named}
    if missing := sum(id(tensor) not in found for tensor in own):
        raise UsageError(f"named_parameters lacks {missing} of the optimizer's {len(own)}; pass those of its model")
    ids = {id(tensor) for tensor in own}
    return [pair for key, pair in found.items() if key in ids], [pair for key, pair in found.items() if key not in ids]
