"""Gradients that wait for an update, as between the batches of a step that accumulates."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...checkpoint.adapters import State
from ...errors import StateError
from ..ddp.plain_model import plain_model
from ..private import version_of
from ..tensors import is_of
from .states import StateDict
from .trees import decode, encode, tensor_nodes

_USED = "_distopt_used_version"  # attribute of a gradient: its version when an optimizer used it


class Gradients(StateDict):
    """The gradients that no optimizer has used since they were computed. Each rank saves its own.

    A gradient that was used, and not yet cleared, is left out: the next step clears it.

    Args:
        objects: the objects of a checkpoint; those with parameters count.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._parameters: dict[str, torch.Tensor] = {}
        known: set[int] = set()
        for name, thing in objects.items():
            for key, parameter in _parameters_of(thing):
                if id(parameter) not in known:
                    known.add(id(parameter))
                    self._parameters[f"{name}/{key}"] = parameter
        super().__init__(self)
        if known:
            _note_uses()

    def state_dict(self) -> dict[str, Any]:
        """Local. The gradients, by names of objects and parameters; None for one that is zero."""
        found = {name: parameter.grad for name, parameter in self._parameters.items()}
        waiting = {name: grad for name, grad in found.items() if grad is not None and not _is_used(grad)}
        return {name: _to_save(grad) for name, grad in waiting.items()}

    def snapshot(self) -> State:
        """Local. The state: `state_dict` as a tree of notes, with its tensors as arrays."""
        arrays: dict[str, Any] = {}
        return State(arrays, {"tree": encode(self.state_dict(), "", arrays)})

    def _check_tree(self, state: State) -> None:
        nodes = tensor_nodes(state.notes["tree"])
        for name in nodes:
            if name not in self._parameters and name.rpartition("/")[0] not in self._parameters:
                raise StateError(f"there is a gradient of {name}, which is no parameter here; pass the same objects")

    def put(self, state: State) -> None:
        """Local. Set the gradients; those of other parameters are cleared."""
        found = decode(state.notes["tree"], state.arrays, self._wholes())
        for name, parameter in self._parameters.items():
            parameter.grad = _from_saved(found[name], parameter) if name in found else None

    def _wholes(self) -> Any:
        return self._parameters.__getitem__


def _parameters_of(thing: Any) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(thing, nn.Module):
        plain, _ = plain_model(thing)
        yield from plain.named_parameters()
    for i, group in enumerate(getattr(thing, "param_groups", ()) if not isinstance(thing, nn.Module) else ()):
        for k, parameter in enumerate(group["params"]):
            yield f"{i}.{k}", parameter


def _to_save(grad: torch.Tensor) -> Any:
    if grad.layout == torch.sparse_coo:
        grad = grad.coalesce()
        return {"indices": grad.indices(), "values": grad.values(), "size": list(grad.shape)}
    local = grad.to_local() if is_of(grad, "torch.distributed.tensor", "DTensor") else grad
    return grad if local.any() else None


def _from_saved(saved: Any, parameter: torch.Tensor) -> torch.Tensor:
    if saved is None:
        return torch.zeros_like(parameter)
    if isinstance(saved, dict):
        saved = torch.sparse_coo_tensor(
            saved["indices"], saved["values"], saved["size"], check_invariants=True
        ).coalesce()
    return saved.to(parameter.device)


# -- uses -------------------------------------------------------------------------------------------------------------
@functools.cache
def _note_uses() -> None:
    """Local. Have every optimizer mark the gradients that it has used, from the first call on."""
    register_optimizer_step_post_hook(_mark)


def _mark(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (grad := parameter.grad) is not None:
                setattr(grad, _USED, version_of(grad))


def _is_used(grad: torch.Tensor) -> bool:
    return bool(getattr(grad, _USED, None) == version_of(grad))
