"""Checks of what PyTorch hands to groups and collectives. All raise a ValueError; `size` is the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


_LONGEST_SECONDS = 1e9  # 31 years; Python's own waits raise an OverflowError beyond 292 years


def seconds_of(timeout: timedelta) -> float:
    """Local. A time-out in seconds; not positive where PyTorch means the time-out of the group."""
    return min(timeout.total_seconds(), _LONGEST_SECONDS)


def check_timeout(timeout: timedelta) -> float:
    """Local. Check that the time-out of a group is positive, and return it in seconds."""
    if (seconds := seconds_of(timeout)) <= 0:
        raise ValueError(
            f"the timeout of the group is {timeout.total_seconds():g} s; give a positive one of less than 292 years, "
            "beyond which PyTorch makes it negative"
        )
    return seconds


def check_list(size: int, name: str, tensors: Sequence[Tensor], role: str, like: Tensor | None = None) -> None:
    """Local. Check that there is a tensor for each rank, all of one type: that of `like`, or of the first."""
    if len(tensors) != size:
        raise ValueError(f"{name}: the {role} list has {len(tensors)} tensors for {size} ranks")
    for tensor in tensors:
        if tensor.dtype != (like if like is not None else tensors[0]).dtype:
            raise ValueError(f"{name}: the {role} list has tensors of another type; give all the same")


def check_whole(size: int, name: str, part: Tensor, whole: Tensor) -> None:
    """Local. Check that `whole` is as long as the parts of all ranks, and of their type."""
    if part.dtype != whole.dtype or part.numel() * size != whole.numel():
        raise ValueError(f"{name}: {whole.numel()} {whole.dtype} are not {size} parts of {part.numel()} {part.dtype}")


def split_rows(size: int, tensor: Tensor, sizes: Sequence[int], role: str) -> list[Tensor]:
    """Local. The rows of a tensor for each rank: as many as `sizes` says or, if that is empty, equal numbers."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if sizes and (len(sizes) != size or sum(sizes) != rows):
        raise ValueError(f"all_to_all_single: {role} splits {list(sizes)} do not cut {rows} rows for each rank")
    if not sizes and rows % size:
        raise ValueError(f"all_to_all_single: {rows} rows of the {role} do not divide by {size} ranks")
    return list(tensor.split(list(sizes) or [rows // size] * size))


def check_any(name: str, tensors: Sequence[Tensor]) -> None:
    """Local. Check that a list has a tensor."""
    if not tensors:
        raise ValueError(f"{name}: the list is empty; give one tensor or more, as many on all ranks")


def check_count(name: str, own: Tensor, *listed: Tensor) -> None:
    """Local. Check that tensors have as many elements as `own`."""
    for tensor in listed:
        if tensor.numel() != own.numel():
            raise ValueError(
                f"{name}: {own.numel()} elements are given, and {tensor.numel()} in the list; give as many"
            )
