"""Gradients: traversal of the graph behind a loss, in reverse.

While `training` is on, every operation stays attached to the tensor that it computes (`core.tensor`). The tensors and
operations behind a loss are its *graph*; its leaves with `stores_grad` are the parameters. A parameter without
`requires_grad` is frozen, and counts as a constant. `backward` visits the operations in reverse order of execution, so
each after all operations that used its result, and computes the gradients of the operation's inputs. It accumulates the
gradients of intermediate tensors for the operations that computed them, and writes the gradients of parameters into
their `grad`. A parameter's gradient is *final* once the last operation that uses it has been visited. It is yielded at
that moment, before the rest of the pass.

Nothing reads a parameter after its gradient has been yielded, since all operations that use it have been visited, so
the consumer may update the parameter in place at once. A visited operation releases its inputs and everything that it
saved, so that memory is freed during the pass. On request it keeps them, so that the graph serves for another pass.

`Model.train` and training steps turn recording on (`mode.training`); dropout and batch normalization follow the same
switch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator
from typing import NamedTuple

from ...errors import UsageError
from ..numerics import numerics_of
from .array import Array
from .mode import mode
from .operation import Operation
from .tensor import Tensor


class CustomBackward(Operation):
    """A custom backward pass, which takes the place of the operation behind a loss.

    Args:
        pairs: returns the pairs that `backward` yields, given its `dy` and `pauses`.
        parameters: returns the parameters that `gradient_order` returns.
    """

    needs = (True,)

    def __init__(
        self,
        pairs: Callable[[Tensor | None, Container[object]], Iterator[tuple[Tensor, Tensor]]],
        parameters: Callable[[], list[Tensor]],
    ) -> None:
        self.pairs, self.parameters = pairs, parameters


def backward(
    loss: Tensor, dy: Tensor | float | None = None, pauses: Container[object] = (), retain_graph: bool = False
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Yield (parameter, gradient) for all parameters behind `loss`, each as soon as its gradient is final.

    If a parameter's `grad` is set, the gradient is written into the memory of that tensor, for example a view of a
    communication buffer. Otherwise memory is allocated and kept as its `grad`. Old values are overwritten, not
    accumulated. The consumer may change a parameter as soon as its pair has been yielded.

    Args:
        loss: a tensor of one element, or of any shape if `dy` is given.
        dy: gradient of `loss`, of its shape, or a number for all elements (default: 1).
        pauses: parameters at whose gradients the consumer has work to do. If steps are captured in CUDA graphs, a
            graph ends at each of them, and the gradients in between are yielded only then.
        retain_graph: whether the graph can be used again, with the parameters' values at that time.

    Raises:
        UsageError: nothing was recorded behind `loss`, its graph has been used before, or an operation has no gradient
            for an input that needs one; or a parameter holds integers.
    """
    _check(loss)
    if isinstance(dy, (int, float)):
        dy = Tensor.of(loss.device.xp.full_like(loss.array, dy), loss.device)
    if isinstance(loss.creator, CustomBackward):
        yield from loss.creator.pairs(dy, pauses)
        return
    if loss.device.capturing == "forward":
        raise UsageError("the backward pass begins while the forward pass is captured; call self.optimizer(loss)")
    visits = _plan(loss)
    if dy is None and loss.size() != 1:
        raise UsageError(f"the gradient of a tensor of shape {loss.shape} needs `dy`; a loss has one element")
    if dy is not None and dy.shape != loss.shape:
        raise UsageError(f"`dy` of shape {dy.shape} is not a gradient of a tensor of shape {loss.shape}")
    pending = {visits[0].op: loss.device.xp.ones_like(loss.array) if dy is None else dy.array.copy()}
    if visits[0].scale != 1:
        pending[visits[0].op] *= visits[0].scale
    del loss  # the traversal frees arrays as soon as it can
    for visit in visits:
        # A separate function, so that no array of a visited operation stays alive while the consumer runs.
        final = _visit(visit, pending, retain_graph)
        if not retain_graph:
            visit.op.inputs = None
        yield from final


def gradient_order(loss: Tensor) -> list[Tensor]:
    """The parameters behind `loss`, in the order in which `backward` will yield them. Computes nothing.

    Raises:
        UsageError: as `backward`.
    """
    _check(loss)
    if isinstance(loss.creator, CustomBackward):
        return loss.creator.parameters()
    return [param for visit in _plan(loss) for param in visit.final]


def _check(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise UsageError(f"a training step starts from its loss, a tensor; got {loss!r}")


def tape(loss: Tensor) -> list[Operation]:
    """The operations behind `loss` in the order in which they ran.

    Raises:
        UsageError: as `backward`.
    """
    if loss.creator is None:
        raise UsageError(
            "no operation was recorded for this tensor; compute the loss from parameters that train, in training mode "
            "(Model.train() or autograd.training = True)"
        )
    if True not in loss.creator.needs:
        raise UsageError(
            "no parameter behind this tensor trains; set requires_grad of one to True, and compute by operators and "
            "functions of autograd: copies, parts by index and results of functions of tensor are outside the graph"
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
        raise UsageError("this graph was used before and is gone; compute the loss again for another backward pass")
    return op.inputs


# -- traversal -----------------------------------------------------------------------------------------------------
class _Visit(NamedTuple):
    """The work of the backward pass at one operation.

    Attributes:
        op: the operation; all operations that use its result come before it.
        sinks: for each input, the operation that computed it or, for a parameter, the parameter itself; None if no
            gradient is needed.
        adds: for each input, whether to add to an earlier gradient.
        final: the parameters whose gradients are final after the visit.
        scale: factor of all gradients during the pass: `mode.loss_scale` in half precision, else 1.
    """

    op: Operation
    sinks: list[Operation | Tensor | None]
    adds: list[bool]
    final: list[Tensor]
    scale: float


def _plan(loss: Tensor) -> list[_Visit]:
    """Plan the backward pass from `loss`, without computing anything.

    Raises:
        UsageError: as `backward`.
    """
    visits = []
    last: dict[Tensor, _Visit] = {}  # the last visit that contributes to a parameter's gradient
    met: set[Operation | Tensor | None] = set()
    ops = tape(loss)
    scale = mode.loss_scale if any(op.half for op in ops) else 1.0
    for op in reversed(ops):
        sinks = [
            (source.creator or source) if needed else None for source, needed in zip(_inputs(op), op.needs, strict=True)
        ]
        visit = _Visit(op, sinks, [], [], scale)
        for sink in sinks:
            visit.adds.append(sink in met)
            met.add(sink)
            if isinstance(sink, Tensor):
                if sink.dtype.kind != "f":
                    raise UsageError(f"{sink!r} cannot train: its gradient would be rounded; convert it by to_type")
                last.pop(sink, None)  # reinsert at the end: gradients are ordered by last use
                last[sink] = visit
        visits.append(visit)
    for param, visit in last.items():
        visit.final.append(param)
    return visits


def _visit(visit: _Visit, pending: dict[Operation, Array], retain_graph: bool) -> list[tuple[Tensor, Tensor]]:
    """Propagate the gradient of an operation's result to its inputs, and release the arrays that the operation saved.

    Args:
        visit: the operation, and where its gradients go.
        pending: gradients of the results of operations not visited yet.
        retain_graph: whether it keeps the saved arrays.

    Returns:
        The parameters whose gradients are now final, with their gradients.
    """
    op, sinks, adds, final, scale = visit
    inputs = _inputs(op)
    into: list[Array] = []  # None for inputs that are not parameters
    for sink, more in zip(sinks, adds, strict=True):
        into.append(_place(sink, more) if isinstance(sink, Tensor) else None)
    device = inputs[0].device
    if device.verbosity:
        gradients = device.timed(f"{type(op).__name__} backward", op.propagate, pending.pop(op), into)
    else:
        gradients = op.propagate(pending.pop(op), into)
    if not retain_graph:
        op.saved = None
    for source, sink, more, place, gradient in zip(inputs, sinks, adds, into, gradients, strict=True):
        if sink is None:
            continue
        if gradient is None:
            raise UsageError(f"{type(op).__name__} has no gradient for its input {source!r}, which needs one")
        if gradient.dtype != source.dtype and source.dtype.kind == "f":  # another input had a wider type
            gradient = gradient.astype(source.dtype)
        if isinstance(sink, Tensor):
            if place is not gradient:
                place[...] = gradient
            if more and sink.grad is not None:
                sink.grad.array += place
        elif more:
            pending[sink] += gradient
        else:
            pending[sink] = gradient
    if scale != 1:
        for param in final:
            if param.grad is not None:
                param.grad.array *= param.dtype.type(1 / scale)
    return [(param, param.grad) for param in final if param.grad is not None]


def _place(param: Tensor, more: bool) -> Array:
    """Memory for one contribution to the gradient of `param`: its `grad` for the first, a new array for each other."""
    if param.grad is None or more:
        data = numerics_of(param.array).empty(param.shape, param.dtype)
        if more:
            return data
        param.grad = Tensor.of(data, param.device, requires_grad=False)
    return param.grad.array
