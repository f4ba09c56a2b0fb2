"""State dictionaries of PyTorch as arrays and JSON, and back.

Nothing is pickled. A tensor becomes an array, named by its path; if NumPy lacks the type, as bfloat16, an array of its
bits. Everything else becomes JSON. Each dictionary, tuple and tensor is an object there, with one key for its kind. A
rank saves its own shard of a DTensor, such as a parameter of FSDP2, so the job resumes with the same number of ranks
only. For another number, `torch.distributed.checkpoint` reshards.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import UsageError
from ..tensors import array_of, dense, is_of

if TYPE_CHECKING:
    from ...files import Arrays

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
        if is_of(value, "torch.distributed.tensor", "DTensor"):
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
        whole: returns, by the name of a DTensor's shard, a DTensor of that layout.
    """
    if isinstance(node, list):
        return [decode(each, arrays, whole) for each in node]
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        name = node["tensor"]
        tensor = tensor_from(arrays[name], getattr(torch, node["dtype"]))
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


def tensor_from(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Local. The tensor of that type whose values, or bits, a file has as `array`."""
    tensor = torch.from_numpy(np.array(array))  # a copy, since optimizers keep the tensors that they load
    if dtype.is_complex:
        return torch.view_as_complex(tensor)
    return tensor.view(dtype) if dtype in _BITS else tensor


def widened(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any] | None:
    """Local. The numbers of floating point in a file's array, as float64; None for an array of others.

    Args:
        array: as in a file.
        dtype: name of the tensor's type.
    """
    kind = getattr(torch, dtype, None)
    if kind in _BITS:
        return np.asarray(torch.from_numpy(np.array(array)).view(kind).float().numpy(), np.float64)
    return array.astype(np.float64) if array.dtype.kind == "f" else None


def narrowed(numbers: np.ndarray[Any, Any], dtype: str, stored: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Local. Numbers of float64 as an array of a file, of type `stored`, has them; rounded once. See `widened`."""
    if (kind := getattr(torch, dtype, None)) not in _BITS:
        return numbers.astype(stored)
    # PyTorch converts by way of float32. Rounded to odd there, what follows is as if rounded once: G. Melquiond and
    # S. Boldo, "When double rounding is odd", 2005.
    near = np.atleast_1d(numbers).astype(np.float32)
    bits = near.view(np.int32)
    with np.errstate(invalid="ignore"):
        away = np.abs(near.astype(np.float64)) > np.abs(numbers)
        exact = (near == numbers) | np.isnan(near)
    odd = np.where(exact, bits, (bits - away) | 1).astype(np.int32).view(np.float32).reshape(numbers.shape)
    stored_bits: np.ndarray[Any, Any] = torch.from_numpy(odd).to(kind).view(_BITS[kind]).numpy()
    return stored_bits


def tensor_nodes(node: Any) -> dict[str, dict[str, str]]:
    """Local. The nodes of the tensors in a tree, by name."""
    if isinstance(node, dict) and "tensor" in node:
        return {node["tensor"]: node}
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return {name: found for each in inner for name, found in tensor_nodes(each).items()}


def items_of(tree: Any) -> dict[Any, Any]:
    """Local. The nodes of the values of an encoded mapping, by those keys that are strings."""
    if not isinstance(tree, dict):
        return {}
    ((_, items),) = tree.items()
    return {key: node for key, node in items if isinstance(key, str)}
