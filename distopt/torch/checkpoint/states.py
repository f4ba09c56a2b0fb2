"""The objects of PyTorch that checkpoints save, each as a part with arrays and JSON; see `trees`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...checkpoint.adapters import Adapter, State, check_some, generator_of
from ...errors import StateError, UsageError
from ..ddp.bucket_order import bucket_order, lay_out
from ..ddp.plain_model import plain_model
from ..private import has_rebuilt_buckets, own_buffers, own_modules
from ..tensors import is_of
from .generators import TorchGenerator
from .trees import decode, encode, items_of, narrowed, tensor_nodes, widened

if TYPE_CHECKING:
    import numpy as np

    from ...files import Arrays

__all__ = ["StateDict", "parts_of"]


def parts_of(objects: Mapping[str, Any], *, replicated: bool) -> dict[str, Any]:
    """Local. A part for each object, in the order in which they resume; NumPy's generators stay as they are.

    Args:
        objects: see `Checkpoint`.
        replicated: whether the parameters of DDP's models are the same on all ranks.

    Raises:
        UsageError: an object has no states to save, or `objects` is empty.
    """
    check_some(objects)
    models = [plain_model(thing)[1] for thing in objects.values() if isinstance(thing, nn.Module)]
    alike = {id(p) for model in models if model is not None and replicated for p in model.parameters()}
    optimizers = [thing for thing in objects.values() if isinstance(thing, torch.optim.Optimizer)]
    agreed = [group for each in optimizers if getattr(each, "parameters_agree", False) for group in each.param_groups]
    alike |= {id(p) for group in agreed for p in group["params"]}
    parts = {name: _part_of(name, thing, alike) for name, thing in objects.items()}
    # Optimizers come last: a schedule that is constructed changes the learning rates of its optimizer.
    return dict(sorted(parts.items(), key=lambda item: isinstance(item[1], OptimizerState)))


def _part_of(name: str, thing: Any, alike: set[int]) -> Any:
    if isinstance(thing, Adapter) or hasattr(thing, "get_states") or generator_of(thing) is not None:
        return thing
    if isinstance(thing, torch.Generator):
        return TorchGenerator(thing)
    if isinstance(thing, nn.Module):
        return ModelState(thing, alike)
    if isinstance(thing, torch.optim.Optimizer):
        return OptimizerState(thing, alike)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return StateDict(thing)
    raise UsageError(
        f"{name} is a {type(thing).__name__}, which cannot be saved; pass objects with state_dict and load_state_dict, "
        "a ResumableSampler, or a random generator of PyTorch, NumPy or Python"
    )


class StateDict(Adapter):
    """An object with `state_dict` and `load_state_dict`. Each rank saves its own."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def snapshot(self) -> State:
        """Local. The result of `state_dict`, as arrays and a tree; see `trees`."""
        arrays: Arrays = {}
        tree = encode(self._thing.state_dict(), "", arrays)
        return State(arrays, {"class": type(self._thing).__name__, "tree": tree})

    def check(self, state: State) -> None:
        """Local. Check that the object has the same class, and a dictionary with the same keys."""
        if "tree" not in state.notes:
            raise StateError("the states are no state dictionary of PyTorch; they are of another script")
        self._check_tree(state)

    def _check_tree(self, state: State) -> None:
        kind, own = state.notes["class"], type(self._thing).__name__
        if kind != own:
            raise StateError(f"the object is of {own}, the states are of {kind}; they are of another script")
        given, mine = (set(items_of(notes["tree"])) for notes in (state.notes, self.snapshot().notes))
        if given != mine:
            names = ", ".join(sorted(given ^ mine))
            raise StateError(f"{names}: in the states or in the object, not in both; they are of another version")

    def put(self, state: State) -> None:
        """Local. Call `load_state_dict`."""
        self._thing.load_state_dict(decode(state.notes["tree"], state.arrays, self._wholes()))

    def widened(self, state: State) -> Arrays:
        """Local. The floating-point numbers in float64; arrays of bits count as the numbers of their type."""
        nodes = tensor_nodes(state.notes["tree"])
        found = {key: widened(array, nodes.get(key, {}).get("dtype", "")) for key, array in state.arrays.items()}
        return {key: numbers for key, numbers in found.items() if numbers is not None}

    def narrowed(self, key: str, numbers: np.ndarray[Any, Any], state: State) -> np.ndarray[Any, Any]:
        """Local. Numbers of float64 as the array `key` has them, rounded once; also as bits of another type."""
        dtype = tensor_nodes(state.notes["tree"]).get(key, {}).get("dtype", "")
        return narrowed(numbers, dtype, state.arrays[key].dtype)

    def _wholes(self) -> Callable[[str], Any]:
        """The argument `whole` of `decode`; without use here, since only models and optimizers have DTensors."""
        return str


class ModelState(StateDict):
    """A model. The parameters of DDP are the same on all ranks; buffers, such as running statistics, may differ.

    Args:
        model: the model; it may be inside DDP and `torch.compile`.
        alike: identities of the parameters that are the same on all ranks.
    """

    def __init__(self, model: nn.Module, alike: set[int]) -> None:
        plain, self._ddp = plain_model(model)
        super().__init__(plain)
        self._alike = alike
        self._buckets: list[str] = []  # their order, when it no longer changes
        self._noted: dict[str, Any] = {}  # the last order, which is not that of new ones
        self._own_names: set[str] | None = None  # of arrays that are not shared
        self._views: dict[str, tuple[torch.Tensor, int, Any]] = {}  # of buffers, whose arrays share their memory
        self._tree: list[tuple[Any, Any]] = []  # dictionaries of the modules in each, and copies from the last walk
        self._places: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {}  # where buffers are in the modules
        self._is_plain = False  # whether these are buffers, and others are shared

    def snapshot(self) -> State:
        """Local; collective if DDP is about to change its buckets. The state, with the order of the buckets."""
        state = super().snapshot()
        del state.notes["class"]  # a model may be loaded into another class with the same arrays
        if self._ddp is not None:
            state.notes["buckets"] = order = self._buckets or bucket_order(self._ddp)
            self._buckets = order if has_rebuilt_buckets(self._ddp) else []
            self._noted = {"buckets": order}
        return state

    def own(self) -> State:
        """Local. The buffers, if the other states are shared parameters."""
        if self._own_names is None:
            arrays = super().snapshot().arrays
            own = arrays.keys() - self.shared(arrays)
            self._is_plain = len(own) < len(arrays) and own <= dict(self._thing.named_buffers()).keys()
            self._own_names = own
        if not self._is_plain:
            return super().own()
        if not self._own_names:
            return State({}, {})
        if not self._tree or any(now != then for now, then in self._tree):
            modules = list(self._thing.named_modules(remove_duplicate=False))
            self._tree = [(own_modules(module), dict(own_modules(module))) for _, module in modules]
            self._places = {
                name: (own_buffers(module), key)
                for path, module in modules
                for key in own_buffers(module)
                if (name := f"{path}.{key}" if path else key) in self._own_names
            }
        arrays = {}
        for name, (buffers, key) in self._places.items():
            if (buffer := buffers.get(key)) is not None:
                known = self._views.get(name)
                if known is None or known[0] is not buffer or known[1] != buffer.data_ptr():
                    found: dict[str, Any] = {}
                    encode(buffer, name, found)
                    known = buffer, buffer.data_ptr(), found[name]
                    if buffer.device.type == "cpu" and buffer.is_contiguous():
                        self._views[name] = known
                arrays[name] = known[2]
        return State(arrays, {})

    def live(self) -> State:
        """Local. The state, with the order of buckets that the last snapshot has had."""
        state = super().snapshot()
        del state.notes["class"]
        return State(state.arrays, {**state.notes, **self._noted})

    def shared(self, names: Iterable[str]) -> set[str]:
        """Local. The names of parameters that are the same on all ranks."""
        own = self._thing.named_parameters(remove_duplicate=False)
        return {name for name, parameter in own if id(parameter) in self._alike} & set(names)

    def _check_tree(self, state: State) -> None:
        mine, given = _described(super().snapshot()), _described(state)
        for name in sorted(mine.keys() | given.keys()):
            if mine.get(name) != given.get(name):
                there = given.get(name, "not in the states")
                raise StateError(
                    f"{name} is {there}, here {mine.get(name, 'unknown')}; the states are of another model"
                )

    def put(self, state: State) -> None:
        """Local; collective under DDP. Give DDP's buckets the saved order, then load the state dictionary."""
        if self._ddp is not None:
            lay_out(self._ddp, state.notes.get("buckets", []))
        super().put(state)

    def _wholes(self) -> Callable[[str], Any]:
        wholes: dict[str, Any] = self._thing.state_dict()
        return wholes.__getitem__


def _described(state: State) -> dict[str, str]:
    """Type, shape and shard of each array, by name."""
    nodes = tensor_nodes(state.notes["tree"])
    found = {}
    for name, array in state.arrays.items():
        node = nodes.get(name, {})
        shard = f", shard {node['shard']}" if "shard" in node else ""
        found[name] = f"{node.get('dtype', array.dtype)} of shape {array.shape}{shard}"
    return found


class OptimizerState(StateDict):
    """An optimizer. Its states are the same on all ranks if its parameters are.

    Args:
        optimizer: the optimizer; if it is a `ZeroRedundancyOptimizer`, each rank saves its share.
        alike: identities of the parameters that are the same on all ranks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, alike: set[int]) -> None:
        self._share = ""
        self._zero: Any = None
        if is_of(optimizer, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
            self._zero = optimizer
            self._share = f"share {self._zero.rank} of {self._zero.world_size}"
            optimizer = self._zero.optim
        super().__init__(optimizer)
        self._all_alike = not self._share and all(id(parameter) in alike for parameter in self._parameters())

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._thing.param_groups for parameter in group["params"]]

    def snapshot(self) -> State:
        """Local. The state; of a `ZeroRedundancyOptimizer`, the share of this rank."""
        if self._zero is not None:
            # Schedules change the learning rates of the outer optimizer, and its `step` copies them to the inner one.
            _copy_options(self._zero.param_groups, self._thing.param_groups)
        state = super().snapshot()
        return State(state.arrays, {**state.notes, "share": self._share})

    def put(self, state: State) -> None:
        """Local. Call `load_state_dict`; a `ZeroRedundancyOptimizer` gets the options of its groups, too."""
        super().put(state)
        if self._zero is not None:
            _copy_options(self._thing.param_groups, self._zero.param_groups)

    def own(self) -> State:
        """Local. If all is shared, what an object such as `DistOpt` changes before the optimizer's update."""
        if not self._all_alike:
            return super().own()
        arrays: Arrays = {}
        if hasattr(self._thing, "unshared_state_dict"):
            encode(self._thing.unshared_state_dict(), "", arrays)
        return State(arrays, {})

    def shared(self, names: Iterable[str]) -> set[str]:
        """Local. All names, if all parameters are the same on all ranks; else none."""
        return set(names) if self._all_alike else set()

    def _check_tree(self, state: State) -> None:
        super()._check_tree(state)
        given, mine = (
            [len(items_of(group)["params"]) for group in items_of(notes["tree"])["param_groups"]]
            for notes in (state.notes, self.snapshot().notes)
        )
        if given != mine:
            raise StateError(f"the optimizer has groups of {mine} parameters, the states of {given}; see the script")
        if state.notes["share"] != self._share:
            raise StateError(f"the states are {state.notes['share'] or 'whole'}, here {self._share or 'whole'}")

    def _wholes(self) -> Callable[[str], Any]:
        parameters = self._parameters()
        return lambda name: parameters[int(name.split("/")[1])]


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Copy the learning rate and the other options of groups of parameters."""
    for own, group in zip(source, target, strict=True):
        group.update({key: value for key, value in own.items() if key != "params"})
