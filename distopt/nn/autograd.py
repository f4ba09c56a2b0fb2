"""Gradients: the graph behind a loss, walked backwards.

While `training` is on, every operation stays attached to the tensor that it computes (`distopt.nn.tensor`). The tensors
and operations behind a loss are its *graph*, and its leaves with `stores_grad` are the parameters. `backward` visits
the operations in the reverse of the order in which they ran: each after all that used its result. Of each it asks the
gradients of the inputs, adds those of intermediate tensors up for the operations that made them, and writes those of
parameters into their `grad`. A parameter's gradient is *final* when the last operation that uses it has been visited,
and is yielded at that moment, while the rest of the pass is still to come.

So nothing reads a parameter after its gradient was yielded: all operations that use it are through, input gradients
included. Its consumer may update the parameter at once, in place. An operation that is through lets go of its inputs
and of all that it saved, so a graph serves for one pass and its memory is free as the walk goes on.

`Model.train` and training steps turn recording on (`mode.training`); dropout and batch normalization follow the same
switch.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NamedTuple

from ..errors import UsageError
from .kernels import kernels_of
from .mode import mode, noted
from .tensor import Operation, Tensor

if TYPE_CHECKING:
    from collections.abc import Container, Generator, Iterator, Sequence

    from .tensor import Array

__all__ = [
    "Visit",
    "Walk",
    "backward",
    "first_gradient",
    "gradient_order",
    "plan",
    "tape",
    "visit_one",
]


class Walk(Operation):
    """A backward pass of somebody else: what stands behind a loss in place of an operation."""

    def pairs(self, dy: Tensor | None, pauses: Container[object]) -> Iterator[tuple[Tensor, Tensor]]:
        """What `backward` is to yield."""
        raise NotImplementedError

    def parameters(self) -> list[Tensor]:
        """What `gradient_order` is to return."""
        raise NotImplementedError


def backward(
    loss: Tensor, dy: Tensor | None = None, pauses: Container[object] = ()
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Local. Yield (parameter, gradient) for all parameters behind `loss`, each when its gradient is final.

    A parameter whose `grad` is set gets its gradient written there, into the memory of that tensor, such as a view of
    a communication buffer; else memory is allocated and kept as its `grad`. Old values are overwritten, not added to.
    The consumer may change the parameter as soon as it has the pair.

    Args:
        loss: a tensor of one element, or of any shape if `dy` is given.
        dy: gradient of `loss`, of its shape (default: 1).
        pauses: parameters at whose gradients the consumer has something to do. Where steps are captured in CUDA graphs
            a graph ends there, and gradients in between come no earlier than the next of these.

    Raises:
        UsageError: nothing was recorded behind `loss`, its graph has been walked before, or an operation has no
            gradient for an input that needs one.
    """
    if isinstance(loss.creator, Walk):
        yield from loss.creator.pairs(dy, pauses)
        return
    if loss.device.recording == "forward":
        raise UsageError("the backward pass begins while the forward pass is captured; call self.optimizer(loss)")
    if mode.ran is not None:
        mode.ran.append("a backward pass begins before the forward pass is complete")
    visits = plan(loss)
    if dy is None:
        pending = first_gradient(loss, visits)
    elif dy.shape != loss.shape:
        raise UsageError(f"`dy` of shape {dy.shape} is no gradient of a tensor of shape {loss.shape}")
    else:
        pending = {visits[0].op: dy.data.copy()}
    del loss  # the walk frees what nothing needs any more
    for visit in visits:
        # A function of its own, so that no array of a visited operation is held while the consumer is busy.
        final = visit_one(visit, pending)
        visit.op.inputs = None
        yield from final


def gradient_order(loss: Tensor) -> list[Tensor]:
    """Local. The parameters behind `loss` in the order in which `backward` will yield them. Computes nothing.

    Raises:
        UsageError: as `backward`.
    """
    if isinstance(loss.creator, Walk):
        return loss.creator.parameters()
    return [param for visit in plan(loss) for param in visit.final]


def tape(loss: Tensor) -> list[Operation]:
    """Local. The operations behind `loss` in the order in which they ran.

    Raises:
        UsageError: as `backward`.
    """
    if loss.creator is None:
        raise UsageError(
            "no operation was recorded for this tensor; compute the loss from parameters in training mode "
            "(Model.train() or autograd.training = True)"
        )
    found = {loss.creator}
    stack = [loss.creator]
    while stack:
        op = stack.pop()
        for source, needed in zip(_inputs(op), op.needs, strict=True):
            if needed and source.creator is not None and source.creator not in found:
                found.add(source.creator)
                stack.append(source.creator)
    return sorted(found, key=lambda op: op.order)


def _inputs(op: Operation) -> tuple[Tensor, ...]:
    if op.inputs is None:
        raise UsageError("this graph was walked before and is gone; compute the loss anew for another backward pass")
    return op.inputs


# -- the walk ------------------------------------------------------------------------------------------------------
class Visit(NamedTuple):
    """What the backward pass does at one operation.

    Attributes:
        op: all operations that use its result come before it.
        sinks: for each input, where its gradient goes: to the operation that computed it, or to the parameter that it
            is; None if it is not wanted.
        adds: for each input, whether an earlier gradient has gone there.
        final: the parameters whose gradients are final then.
    """

    op: Operation
    sinks: list[Operation | Tensor | None]
    adds: list[bool]
    final: list[Tensor]


def plan(loss: Tensor) -> list[Visit]:
    """Local. The backward pass from `loss`, of which nothing has been computed.

    Raises:
        UsageError: as `backward`.
    """
    visits = []
    last: dict[Tensor, Visit] = {}  # that adds to the gradient of a parameter
    met: set[Operation | Tensor | None] = set()
    for op in reversed(tape(loss)):
        sinks = [
            (source.creator or source) if needed else None for source, needed in zip(_inputs(op), op.needs, strict=True)
        ]
        visit = Visit(op, sinks, [], [])
        for sink in sinks:
            visit.adds.append(sink in met)
            met.add(sink)
            if isinstance(sink, Tensor):
                last.pop(sink, None)  # to the end: gradients come in the order of their last uses
                last[sink] = visit
        visits.append(visit)
    for param, visit in last.items():
        visit.final.append(param)
    return visits


def first_gradient(loss: Tensor, visits: Sequence[Visit]) -> dict[Operation, Array]:
    """What is pending when a walk from `loss` begins: that the gradient of the loss is 1.

    Raises:
        UsageError: it has more than one element.
    """
    if loss.size() != 1:
        raise UsageError(f"the gradient of a tensor of shape {loss.shape} needs `dy`; a loss has one element")
    return {visits[0].op: loss.device.xp.ones_like(loss.data)}


def visit_one(visit: Visit, pending: dict[Operation, Array]) -> list[tuple[Tensor, Tensor]]:
    """Pass the gradient of the result of an operation on to its inputs, and let go of what it saved.

    Args:
        visit: what to do.
        pending: gradients of the results of operations that have not been visited.

    Returns:
        The parameters whose gradients are final now, and these.
    """
    op, sinks, adds, final = visit
    inputs = _inputs(op)
    into: list[Array] = []  # None for inputs that are no parameters
    for sink, more in zip(sinks, adds, strict=True):
        into.append(_place(sink, more) if isinstance(sink, Tensor) else None)
    device = inputs[0].device
    if device.verbosity:
        gradients = device.timed(f"{type(op).__name__} backward", op.backward, pending.pop(op), into)
    else:
        gradients = op.backward(pending.pop(op), into)
    op.saved = None
    for source, sink, more, place, gradient in zip(inputs, sinks, adds, into, gradients, strict=True):
        if sink is None:
            continue
        if gradient is None:
            raise UsageError(f"{type(op).__name__} has no gradient for its input {source!r}, which needs one")
        if isinstance(sink, Tensor):
            if place is not gradient:
                noted(operator.setitem, place, ..., gradient)
            if more and sink.grad is not None:
                noted(operator.iadd, sink.grad.data, place)
        elif more:
            pending[sink] = noted(operator.iadd, pending[sink], gradient)
        else:
            pending[sink] = gradient
    return [(param, param.grad) for param in final if param.grad is not None]


def _place(param: Tensor, more: bool) -> Array:
    """Memory for a contribution to the gradient of `param`: its `grad` for the first, a scratch array for others."""
    if param.grad is None or more:
        data = kernels_of(param.data).empty(param.shape, param.dtype)
        if more:
            return data
        param.grad = Tensor(data=data, device=param.device, requires_grad=False)
    return param.grad.data
