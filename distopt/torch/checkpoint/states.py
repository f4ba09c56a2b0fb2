"""The state dictionaries of PyTorch's objects as arrays and JSON, which checkpoints save.

Nothing is pickled. A tensor becomes an array, named by its path; if NumPy lacks the type, as bfloat16, an array of its
bits. Everything else becomes JSON. Each dictionary, tuple and tensor is an object there, with one key for its kind. A
rank saves its own shard of a DTensor, such as a parameter of FSDP2, so the job resumes with the same number of ranks
only. For another number, `torch.distributed.checkpoint` reshards.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...checkpoint.adapters import Adapter, State
from ...errors import StateError, UsageError
from ..ddp.bucket_order import bucket_order, lay_out
from ..private import has_rebuilt_buckets, uncompiled
from ..tensors import array_of, dense

if TYPE_CHECKING:
    from ...files import Arrays

__all__ = ["Generators", "parts_of", "plain_model"]

_KINDS: dict[tuple[type, type | None], str] = {  # names of mappings, by type and `default_factory`
    **{(kind, None): kind.__name__ for kind in (dict, OrderedDict, Counter, defaultdict)},
    **{(defaultdict, kind): f"defaultdict({kind.__name__})" for kind in (int, float, str, list, dict)},
}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    name: partial(kind, made) if kind is defaultdict else kind for (kind, made), name in _KINDS.items()
}
_TUPLES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "Size": torch.Size}
_SCALARS = {np.dtype(code) for code in "?bhilqBHILQefd"}
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_BITS = {torch.bfloat16: torch.int16, **{getattr(torch, name): torch.uint8 for name in _FLOAT8}}


def parts_of(objects: Mapping[str, Any], *, replicated: bool) -> dict[str, Any]:
    """Local. A part for each object, in the order in which they resume; NumPy's generators stay as they are.

    Args:
        objects: see `Checkpoint`.
        replicated: whether the parameters of DDP's models are the same on all ranks.

    Raises:
        UsageError: an object has no states to save.
    """
    models = [plain_model(thing)[1] for thing in objects.values() if isinstance(thing, nn.Module)]
    alike = {id(p) for model in models if model is not None and replicated for p in model.parameters()}
    optimizers = [thing for thing in objects.values() if isinstance(thing, torch.optim.Optimizer)]
    agreed = [group for each in optimizers if getattr(each, "parameters_agree", False) for group in each.param_groups]
    alike |= {id(p) for group in agreed for p in group["params"]}
    parts = {name: _part_of(name, thing, alike) for name, thing in objects.items()}
    # Optimizers come last: a schedule that is constructed changes the learning rates of its optimizer.
    return dict(sorted(parts.items(), key=lambda item: isinstance(item[1], OptimizerState)))


def _part_of(name: str, thing: Any, alike: set[int]) -> Any:
    if isinstance(thing, (np.random.Generator, Adapter)) or hasattr(thing, "get_states"):
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
        "a ResumableSampler, or a random generator of PyTorch or NumPy"
    )


def _is(thing: Any, module: str, name: str) -> bool:
    """Whether `thing` is of a class, without importing its module, which takes half a second or more."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(thing, kind)


def plain_model(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """Local. The model inside DDP and `torch.compile`, with its own names, and the DDP around it, if there is one."""
    ddp = None
    while True:
        if isinstance(model, DistributedDataParallel):
            ddp, model = model, model.module
        elif (inner := uncompiled(model)) is not model:
            model = inner
        else:
            return model, ddp


# -- trees ------------------------------------------------------------------------------------------------------------
def encode(value: Any, path: str, arrays: dict[str, Any]) -> Any:
    """Local. `value` as JSON; adds its tensors and arrays to `arrays`.

    Raises:
        UsageError: `value` contains something that is neither JSON nor an array.
    """

    def under(key: object, inner: Any) -> Any:
        return encode(inner, f"{path}/{key}" if path else str(key), arrays)

    kind: type = type(value)  # exactly: an object of a derived class would become one of its base
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [under(i, each) for i, each in enumerate(value)]
    if kind is _TUPLES.get(kind.__name__):
        return {kind.__name__: [under(i, each) for i, each in enumerate(value)]}
    if (mapping := _KINDS.get((kind, getattr(value, "default_factory", None)))) is not None:
        return {mapping: [[encode(key, path, arrays), under(key, each)] for key, each in value.items()]}
    if isinstance(value, np.str_) or (isinstance(value, np.generic) and value.dtype in _SCALARS):
        return {"scalar": ["str" if isinstance(value, np.str_) else value.dtype.name, value.item()]}
    name = path if path not in arrays else f"{path}#{len(arrays)}"
    if kind is np.ndarray:
        arrays[name] = value
        return {"array": name}
    if isinstance(value, torch.Tensor) and value.is_meta:
        raise UsageError(f"{path} is a tensor on the device meta, which has no values; give it some before it is saved")
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        node = {"tensor": name, "dtype": str(value.dtype).removeprefix("torch.")}
        if _is(value, "torch.distributed.tensor", "DTensor"):
            mesh = value.device_mesh
            node["shard"] = f"{mesh.get_coordinate()} of {list(mesh.shape)} of {list(value.shape)}, {value.placements}"
            value = value.to_local()
        arrays[name] = _array(value)
        return node
    raise UsageError(
        f"{path} is a {type(value).__name__}, which can be saved neither as an array nor as JSON; make it a tensor, "
        "array, number, str, list, tuple or dict in the object's state_dict, or leave it out"
    )


def decode(node: Any, arrays: Arrays, whole: Callable[[str], Any]) -> Any:
    """Local. The value that `encode` has turned into `node`.

    Args:
        node: JSON.
        arrays: the tensors, by name.
        whole: returns, by the name of a shard, a DTensor with the layout of the shard's own.
    """
    if isinstance(node, list):
        return [decode(each, arrays, whole) for each in node]
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        name = node["tensor"]
        tensor = _tensor(arrays[name], getattr(torch, node["dtype"]))
        return _part_of_whole(tensor, whole(name)) if "shard" in node else tensor
    ((kind, inner),) = node.items()
    if kind == "array":
        return arrays[inner]
    if kind == "scalar":
        return np.dtype(inner[0]).type(inner[1])
    if kind in _TUPLES:
        return _TUPLES[kind](decode(inner, arrays, whole))
    return _MAPPINGS[kind]({decode(key, arrays, whole): decode(each, arrays, whole) for key, each in inner})


def _part_of_whole(shard: torch.Tensor, whole: Any) -> torch.Tensor:
    """A DTensor with this rank's `shard`, and the layout of `whole`."""
    from torch.distributed.tensor import DTensor

    shard = shard.to(whole.to_local().device)
    layout = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(shard, whole.device_mesh, whole.placements, run_check=False, **layout)


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor as an array, a view if it is contiguous; pairs of numbers or bits for types that files lack."""
    tensor = dense(tensor.cpu())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    elif tensor.dtype in _BITS:
        tensor = tensor.view(_BITS[tensor.dtype])
    array: np.ndarray[Any, Any] = array_of(tensor).reshape(tensor.shape)
    return array


def _tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array))  # a copy, since optimizers keep the tensors that they load
    if dtype.is_complex:
        return torch.view_as_complex(tensor)
    return tensor.view(dtype) if dtype in _BITS else tensor


def _tensors(node: Any) -> dict[str, dict[str, str]]:
    """The nodes of the tensors in a tree, by name."""
    if isinstance(node, dict) and "tensor" in node:
        return {node["tensor"]: node}
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return {name: found for each in inner for name, found in _tensors(each).items()}


def _items(tree: Any) -> dict[Any, Any]:
    """The nodes of the values of an encoded mapping, by key, for keys that are strings."""
    if not isinstance(tree, dict):
        return {}
    ((_, items),) = tree.items()
    return {key: node for key, node in items if isinstance(key, str)}


# -- parts ------------------------------------------------------------------------------------------------------------
class StateDict(Adapter):
    """An object with `state_dict` and `load_state_dict`. Each rank saves its own."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def look(self) -> State:
        arrays: Arrays = {}
        tree = encode(self._thing.state_dict(), "", arrays)
        return State(arrays, {"class": type(self._thing).__name__, "tree": tree})

    def check(self, state: State) -> None:
        if "tree" not in state.notes:
            raise StateError("the states are no state dictionary of PyTorch; they are of another script")
        self._check_tree(state)

    def _check_tree(self, state: State) -> None:
        kind, own = state.notes["class"], type(self._thing).__name__
        if kind != own:
            raise StateError(f"the object is of {own}, the states are of {kind}; they are of another script")
        given, mine = (set(_items(notes["tree"])) for notes in (state.notes, self.look().notes))
        if given != mine:
            names = ", ".join(sorted(given ^ mine))
            raise StateError(f"{names}: in the states or in the object, not in both; they are of another version")

    def put(self, state: State) -> None:
        self._thing.load_state_dict(decode(state.notes["tree"], state.arrays, self._wholes()))

    def _wholes(self) -> Callable[[str], Any]:
        """See `decode`; only models and optimizers have shards."""
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

    def look(self) -> State:
        state = super().look()
        del state.notes["class"]  # a model may be loaded into another class with the same arrays
        if self._ddp is not None:
            state.notes["buckets"] = order = self._buckets or bucket_order(self._ddp)
            self._buckets = order if has_rebuilt_buckets(self._ddp) else []
        return state

    def shared(self, names: Iterable[str]) -> set[str]:
        own = self._thing.named_parameters(remove_duplicate=False)
        return {name for name, parameter in own if id(parameter) in self._alike} & set(names)

    def _check_tree(self, state: State) -> None:
        mine, given = _described(super().look()), _described(state)
        for name in sorted(mine.keys() | given.keys()):
            if mine.get(name) != given.get(name):
                there = given.get(name, "not in the states")
                raise StateError(
                    f"{name} is {there}, here {mine.get(name, 'unknown')}; the states are of another model"
                )

    def put(self, state: State) -> None:
        if self._ddp is not None:
            lay_out(self._ddp, state.notes.get("buckets", []))
        super().put(state)

    def _wholes(self) -> Callable[[str], Any]:
        wholes: dict[str, Any] = self._thing.state_dict()
        return wholes.__getitem__


def _described(state: State) -> dict[str, str]:
    """Type, shape and shard of each array, by name."""
    nodes = _tensors(state.notes["tree"])
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
        if _is(optimizer, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
            self._zero = optimizer
            self._share = f"share {self._zero.rank} of {self._zero.world_size}"
            optimizer = self._zero.optim
        super().__init__(optimizer)
        self._all_alike = not self._share and all(id(parameter) in alike for parameter in self._parameters())

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._thing.param_groups for parameter in group["params"]]

    def look(self) -> State:
        if self._zero is not None:
            # Schedules change the learning rates of the outer optimizer, and its `step` copies them to the inner one.
            _copy_options(self._zero.param_groups, self._thing.param_groups)
        state = super().look()
        return State(state.arrays, {**state.notes, "share": self._share})

    def put(self, state: State) -> None:
        super().put(state)
        if self._zero is not None:
            _copy_options(self._thing.param_groups, self._zero.param_groups)

    def shared(self, names: Iterable[str]) -> set[str]:
        return set(names) if self._all_alike else set()

    def _check_tree(self, state: State) -> None:
        super()._check_tree(state)
        given, mine = (
            [len(_items(group)["params"]) for group in _items(notes["tree"])["param_groups"]]
            for notes in (state.notes, self.look().notes)
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


class TorchGenerator(Adapter):
    """A random generator of PyTorch."""

    random = True

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def look(self) -> State:
        return State({"": array_of(self._generator.get_state())}, {"device": self._generator.device.type})

    def check(self, state: State) -> None:
        own = self.look()
        if state.notes != own.notes or state.arrays.get("", np.empty(0)).shape != own.arrays[""].shape:
            raise StateError(f"the generator is one of {own.notes['device']}, the states are of another kind")

    def put(self, state: State) -> None:
        self._generator.set_state(_tensor(state.arrays[""], torch.uint8))


class Generators(Adapter):
    """The global random generators of PyTorch, of Python and of NumPy."""

    random = True

    def __init__(self) -> None:
        self._loaded: State | None = None

    def look(self) -> State:  # noqa: D102
        version, words, gauss = random.getstate()
        states = {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
            "python": (version, np.array(words, np.uint32), gauss),
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 - the global one, of augmentations
        }
        arrays: Arrays = {}
        return State(arrays, {"": encode(states, "", arrays)})

    def check(self, state: State) -> None:  # noqa: D102
        if not {"torch", "python/1"} <= state.arrays.keys():
            raise StateError("these are no states of random generators")

    def put(self, state: State) -> None:  # noqa: D102
        self._loaded = state
        states = decode(state.notes[""], state.arrays, str)
        torch.set_rng_state(states["torch"])
        if states["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        np.random.set_state(states["numpy"])  # noqa: NPY002

    def put_again(self) -> None:
        """Local. Set the states of the last `put` again."""
        if self._loaded is not None:
            self.put(self._loaded)
