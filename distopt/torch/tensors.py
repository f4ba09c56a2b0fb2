"""CPU tensors as the arrays that communicators move, and the reductions of `torch.distributed`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..comm.base import DTYPES, OPS, ReduceOp

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
# The types that communicators reduce. They also reduce bfloat16, and sum complex numbers as pairs; NumPy does the rest.
_NATIVE = {getattr(torch, name): np.dtype(name) for name in DTYPES if name != "bfloat16"}
_NUMPY = _NATIVE | {
    getattr(torch, name): np.dtype(name) for name in ("uint16", "uint32", "uint64", "complex64", "complex128")
}
_BYTES, _UINT16 = np.dtype("uint8"), np.dtype("uint16")
# All memory from an address on; each array views a part of it. A ctypes type for each size would cost 40 us.
_memory_at = (ctypes.c_char * sys.maxsize).from_address


@dataclass(frozen=True)
class Reduction:
    """A reduction of `torch.distributed`.

    Attributes:
        op: a key of `distopt.comm.base.OPS`.
        fold: the same reduction of two arrays.
        factor: each rank multiplies its values by it first; None for 1.
    """

    op: ReduceOp
    fold: np.ufunc
    factor: float | None = None


_RED_OPS = dist.ReduceOp.RedOpType
_REDUCTIONS = {
    _RED_OPS.SUM: Reduction("sum", np.add),
    _RED_OPS.AVG: Reduction("mean", np.add),
    _RED_OPS.PRODUCT: Reduction("product", np.multiply),
    _RED_OPS.MIN: Reduction("min", np.minimum),
    _RED_OPS.MAX: Reduction("max", np.maximum),
    _RED_OPS.BAND: Reduction("and", np.bitwise_and),
    _RED_OPS.BOR: Reduction("or", np.bitwise_or),
    _RED_OPS.BXOR: Reduction("xor", np.bitwise_xor),
}

_OF_ALL, _OF_REALS, _OF_INTEGERS = {"sum", "product"}, {"sum", "product", "max", "min"}, set(OPS) - {"mean"}
_OPS_OF = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), _OF_REALS | {"mean"}),
    **dict.fromkeys((torch.int8, torch.int16, torch.int32, torch.int64, torch.bool), _OF_INTEGERS),
    **dict.fromkeys((torch.uint8, torch.uint16, torch.uint32, torch.uint64), _OF_INTEGERS),
    **dict.fromkeys(_REAL, _OF_ALL | {"mean"}),
}


# By number of the operation, whose names PyTorch makes and compares slowly, and type of the tensor.
_KNOWN = {
    (kind.value, dtype): reduction
    for kind, reduction in _REDUCTIONS.items()
    for dtype, ops in _OPS_OF.items()
    if reduction.op in ops
}
# The reductions that communicators make in place: the codes of type and reduction, and the bytes of an element.
_CODES = {
    key: (DTYPES[name], OPS[_KNOWN[key].op], key[1].itemsize)
    for key in _KNOWN
    if (name := str(key[1]).removeprefix("torch.")) in DTYPES
}


def memory_of(tensor: torch.Tensor, reduce_op: Any, limit_bytes: int) -> tuple[int, int, int, int] | None:
    """Local. Address, count, type and reduction of a small tensor that a communicator reduces where it lies.

    None if the tensor has `limit_bytes` or more, is not plain memory, or if it takes more than its type and `reduce_op`
    to say what is to be done.
    """
    codes = _CODES.get((reduce_op.op.value, tensor.dtype))
    if codes is None or tensor.layout is not torch.strided or not tensor.is_contiguous() or not tensor.is_cpu:
        return None
    (dtype, op, item_bytes), count, address = codes, tensor.numel(), tensor.data_ptr()
    if not address or address % item_bytes or count * item_bytes >= limit_bytes or tensor.is_neg():
        return None
    return address, count, dtype, op


def reduction_of(reduce_op: Any, tensor: torch.Tensor) -> Reduction:
    """Local. The reduction that the `reduceOp` of an options object names, for a tensor like `tensor`.

    Raises:
        ValueError: this reduction does not exist for tensors of that type or layout.
    """
    kind, factor = getattr(reduce_op, "op", reduce_op), None
    known = _KNOWN.get((kind.value, tensor.dtype))
    if known is not None and not tensor.is_sparse:
        return known
    if kind == _RED_OPS.PREMUL_SUM:
        kind, factor = _RED_OPS.SUM, reduce_op.factor
        if isinstance(factor, torch.Tensor):
            factor = factor.item()  # a tensor of one element: PyTorch refuses others
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"ReduceOp.PREMUL_SUM has no meaning for {tensor.dtype}; convert it to a floating type")
    reduction = _REDUCTIONS[kind]
    if reduction.op not in _OPS_OF.get(tensor.dtype, ()):
        raise ValueError(f"ReduceOp.{kind.name} has no meaning for {tensor.dtype}; convert the tensor to another type")
    if tensor.is_sparse and kind != _RED_OPS.SUM:
        raise ValueError("sparse tensors can only be summed; call to_dense() for another reduction")
    return reduction if factor is None else replace(reduction, factor=factor)


def is_of(thing: Any, module: str, name: str) -> bool:
    """Local. Whether `thing` is of a class, without importing its module, which takes half a second or more."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(thing, kind)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Local. `tensor`, detached and contiguous: a view of its memory if that is contiguous, else a copy.

    Raises:
        ValueError: it is not on the CPU, not strided, or quantized.
    """
    if not tensor.is_cpu:
        raise ValueError(
            f"the backend distopt serves CPU tensors, not those on {tensor.device}; make a group for these"
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"a tensor of layout {tensor.layout} cannot be sent; call to_dense(); all_reduce alone takes sparse ones, "
            "of to_sparse_coo()"
        )
    if tensor.is_quantized:
        raise ValueError("a quantized tensor cannot be sent, since ranks may differ in scale; send its int_repr()")
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if lies_in_a_row(tensor) else tensor.contiguous().resolve_conj().resolve_neg()


def lies_in_a_row(tensor: torch.Tensor) -> bool:
    """Local. Whether `dense` would return a view of the tensor's own memory."""
    return tensor.layout == torch.strided and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def give_back(row: torch.Tensor, tensor: torch.Tensor) -> None:
    """Local. Copy the result in `row`, which `dense` made, back to `tensor`, unless `row` is a view of it."""
    if row.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(row.view_as(tensor))


def array_of(row: torch.Tensor, dtype: np.dtype[Any] | None = None) -> np.ndarray[Any, Any]:
    """Local. A flat array over the memory of a dense tensor; the array keeps the tensor alive.

    `Tensor.numpy` would mark the storage, for good, as one that cannot be resized; FSDP and hooks of DDP resize theirs.

    Args:
        row: a dense tensor on the CPU.
        dtype: the type of the array (default: the type of the tensor, which NumPy must have).

    Raises:
        ValueError: its storage has been emptied.
    """
    dtype = dtype or _NUMPY[row.dtype]
    address, count = row.data_ptr(), row.nbytes // dtype.itemsize
    if count and not address:
        raise ValueError(
            f"the storage of a tensor of {list(row.shape)} {row.dtype} is empty; resize it before the tensor is used"
        )
    memory = _memory_at(address)
    memory.tensor = row  # type: ignore[attr-defined] # lives as long as the array
    array: np.ndarray[Any, Any] = np.frombuffer(memory, dtype, count)  # type: ignore[call-overload] # any buffer
    return array


def as_numbers(row: torch.Tensor, op: ReduceOp) -> tuple[np.ndarray[Any, Any], str | None] | None:
    """Local. A dense tensor as an array to reduce by `op`, and its `wire` type; None if communicators cannot."""
    dtype = row.dtype
    if dtype in _NATIVE:
        return array_of(row, _NATIVE[dtype]), None
    if dtype == torch.bfloat16:
        return array_of(row, _UINT16), "bfloat16"
    if dtype in _REAL and op in ("sum", "mean"):
        return array_of(row, _NATIVE[_REAL[dtype]]), None
    return None


def as_items(row: torch.Tensor) -> tuple[np.ndarray[Any, Any], str]:
    """Local. A dense tensor as an array to move, and its type as a label where the array has only bytes."""
    if row.dtype in _NATIVE:
        return array_of(row, _NATIVE[row.dtype]), ""
    return array_of(row, _BYTES), str(row.dtype).removeprefix("torch.")


def as_message(row: torch.Tensor) -> tuple[np.ndarray[Any, Any], str | None]:
    """Local. A dense tensor as an array for a message, with its `wire` type."""
    return as_numbers(row, "product") or (as_items(row)[0], None)  # complex numbers have no product, and go as bytes


def refuse_nan(results: Sequence[torch.Tensor], args: Sequence[Any], rank: int) -> None:
    """Local. Look for NaN in the tensors that an operation reads: `args` without `results`, else all `args`.

    Raises:
        RuntimeError: there is one. PyTorch's own groups use these words, too, with TORCH_DIST_NAN_CHECK=1.
    """
    written = {tensor.untyped_storage().data_ptr() for tensor in results}
    tensors = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    tensors = [each for each in tensors if isinstance(each, torch.Tensor)]
    read = [each for each in tensors if each.untyped_storage().data_ptr() not in written] or tensors
    for tensor in read:
        if (tensor.is_floating_point() or tensor.is_complex()) and bool(torch.isnan(tensor).any()):
            raise RuntimeError(f"NaN found in input tensor of rank {rank}; TORCH_DIST_NAN_CHECK=1 asks for this check")
