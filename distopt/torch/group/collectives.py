"""The collectives of `torch.distributed`, made of collectives of a communicator. All methods here wait for the end.

The communicator compares the kinds, counts, types and labels of what the ranks call. Distinctions that PyTorch makes
and the communicator does not, such as list or tensor, are therefore part of the label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ...errors import MismatchError, UsageError
from ..private import complex_base
from ..tensors import array_of, as_items, as_numbers, dense, give_back, lies_in_a_row

if TYPE_CHECKING:
    from torch import Tensor

    from ...comm.base import Array, Communicator, Work
    from ..tensors import Reduction


class Collectives:
    """Collectives of CPU tensors of any dtype and layout, over one communicator.

    Each waits at most `seconds` for the other ranks (None: the timeout of the communicator).
    """

    def __init__(self, communicator: Communicator, who: Sequence[str]) -> None:
        """Local. `who`: how error messages name the ranks."""
        self._communicator = communicator
        self._who = who
        self._rank = communicator.topology.rank
        self._size = communicator.topology.world_size

    def noted(self, note: str) -> Collectives:
        """Local. The same collectives, with `note` at the beginning of their labels."""
        return Collectives(cast("Communicator", _Noted(self._communicator, note)), self._who)

    # -- reductions --------------------------------------------------------------------------------------------------
    def all_reduce(self, tensor: Tensor, reduction: Reduction, seconds: float | None, label: str = "") -> None:
        """Collective. Replace `tensor` by the reduction over all ranks."""
        if tensor.is_sparse:
            self._add_sparse(tensor, reduction, seconds, label)
            return
        row = dense(tensor)
        if reduction.factor is not None:
            row.mul_(reduction.factor)
        numbers = as_numbers(row, reduction.op)
        if numbers is None:
            self._fold(row, reduction, seconds, label)
        else:
            array, wire = numbers
            self._communicator.all_reduce(array, reduction.op, wire=wire, label=label).wait(seconds)
        if row is not tensor:
            give_back(row, tensor)

    def _start_all_reduce(self, tensor: Tensor, reduction: Reduction) -> Work | None:
        if not lies_in_a_row(tensor) or reduction.factor is not None:
            return None
        if (numbers := as_numbers(dense(tensor), reduction.op)) is None:
            return None
        return self._communicator.all_reduce(numbers[0], reduction.op, wire=numbers[1])

    def reduce(self, tensor: Tensor, reduction: Reduction, root: int, seconds: float | None) -> None:
        """Collective. As `all_reduce`, but only the tensor of rank `root` changes."""
        row = tensor if self._rank == root else tensor.detach().clone()
        self.all_reduce(row, reduction, seconds, f"reduce to {root}")

    def reduce_scatter(self, out: Tensor, tensor: Tensor, reduction: Reduction, seconds: float | None) -> None:
        """Collective. Write this rank's part of the reduction to `out`; `tensor` has one part for every rank."""
        row, part = dense(tensor), dense(out)
        if reduction.factor is not None:
            row = row.clone().mul_(reduction.factor)  # in place, so that the type of the factor does not matter
        numbers, result = as_numbers(row, reduction.op), as_numbers(part, reduction.op)
        if numbers is None or result is None:
            whole = row.clone()
            self._fold(whole, reduction, seconds, "reduce_scatter")
            part.view(-1).copy_(whole.view(self._size, -1)[self._rank])
        else:
            (array, wire), (result_array, _) = numbers, result
            self._communicator.reduce_scatter(array, result_array, reduction.op, wire=wire).wait(seconds)
        give_back(part, out)

    def _start_reduce_scatter(self, out: Tensor, tensor: Tensor, reduction: Reduction) -> Work | None:
        if not (lies_in_a_row(out) and lies_in_a_row(tensor)) or reduction.factor is not None:
            return None
        numbers, result = as_numbers(dense(tensor), reduction.op), as_numbers(dense(out), reduction.op)
        if numbers is None or result is None:
            return None
        return self._communicator.reduce_scatter(numbers[0], result[0], reduction.op, wire=numbers[1])

    def reduce_scatter_list(
        self, out: Tensor, parts: Sequence[Tensor], reduction: Reduction, seconds: float | None
    ) -> None:
        """Collective. As `reduce_scatter`, with `parts[r]` for rank r; sizes may differ between parts."""
        row = torch.cat([dense(part).view(-1) for part in parts])
        sizes = [part.numel() for part in parts]
        if len(set(sizes)) == 1:
            self.reduce_scatter(out, row, reduction, seconds)
        else:
            self.all_reduce(row, reduction, seconds, f"reduce_scatter of {sizes}")
            out.detach().copy_(row.split(sizes)[self._rank].view_as(out))

    def _fold(self, row: Tensor, reduction: Reduction, seconds: float | None, label: str) -> None:
        """Reduce by NumPy, for types that communicators do not: gather all tensors, and fold them in rank order."""
        whole = row.new_empty((self._size, *row.shape))
        self._gather(row, whole, seconds, f"{label} {reduction.op}")
        parts = array_of(whole).reshape(self._size, -1)
        for part in parts[1:]:
            reduction.fold(parts[0], part, out=parts[0])
        row.copy_(whole[0] / self._size if reduction.op == "mean" else whole[0])

    def _add_sparse(self, tensor: Tensor, reduction: Reduction, seconds: float | None, label: str) -> None:
        """Gather the entries of all ranks, and add them in rank order."""
        own = tensor.detach().coalesce()
        if reduction.factor is not None:
            own = own * reduction.factor
        kind = [own.sparse_dim(), *own.shape]
        label = f"{label} sparse".lstrip()
        head = torch.tensor([len(kind), *kind, own.indices().shape[1]], device="cpu")
        heads = self._gather_ragged(torch.cat([head, own.indices().reshape(-1)]), seconds, label)
        values = self._gather_ragged(own.values(), seconds, label)
        total = torch.zeros_like(own)
        self._agree_on_kinds([each[1 : 1 + int(each[0])].tolist() for each in heads])
        for each, part in zip(heads, values, strict=True):
            nnz = int(each[len(head) - 1])
            indices = each[len(head) :].view(own.sparse_dim(), nnz)
            entries = part.view(nnz, *own.values().shape[1:])
            total = total + torch.sparse_coo_tensor(indices, entries, own.shape, check_invariants=False)
        with torch.no_grad():  # instead of detach(), which copies a sparse tensor
            tensor.copy_(total.coalesce())
            # PyTorch passes a complex tensor as a real view, which has entries of its own now.
            if (base := complex_base(tensor)) is not None:
                base.copy_(torch.view_as_complex(tensor))

    def _gather_ragged(self, tensor: Tensor, seconds: float | None, label: str) -> list[Tensor]:
        """Gather flat tensors of all ranks; counts may differ."""
        array, dtype = as_items(dense(tensor).view(-1))
        work = self._communicator.all_gather_ragged(array, label=f"{label} {dtype}".rstrip())
        work.wait(seconds)
        return [_elements(part, tensor) for part in work.parts]

    def _agree_on_kinds(self, kinds: Sequence[list[int]]) -> None:
        """Raise an error on all ranks if the sparse tensors of two ranks differ in shape or sparse_dim."""
        for who, kind in zip(self._who, kinds, strict=True):
            if kind != kinds[0]:
                raise MismatchError(
                    f"{self._who[0]} sums a sparse tensor of shape {kinds[0][1:]} with sparse_dim {kinds[0][0]}, {who} "
                    f"one of shape {kind[1:]} with sparse_dim {kind[0]}; give all ranks the same shape and sparse_dim"
                )

    # -- moves -------------------------------------------------------------------------------------------------------
    def broadcast(self, tensor: Tensor, root: int, seconds: float | None) -> None:
        """Collective. Overwrite `tensor` by the tensor of rank `root`."""
        row = dense(tensor)
        array, label = as_items(row)
        self._communicator.broadcast(array, root, label=label).wait(seconds)
        if self._rank != root:
            give_back(row, tensor)

    def all_gather(self, out: Tensor, tensor: Tensor, seconds: float | None) -> None:
        """Collective. Write the tensors of all ranks to `out`, one after the other."""
        row, whole = dense(tensor), dense(out)
        self._gather(row, whole, seconds)
        give_back(whole, out)

    def _start_all_gather(self, out: Tensor, tensor: Tensor) -> Work | None:
        if not (lies_in_a_row(out) and lies_in_a_row(tensor)):
            return None
        (array, dtype), (whole, _) = as_items(dense(tensor)), as_items(dense(out))
        return self._communicator.all_gather(array, whole, label=dtype)

    def all_gather_list(self, outs: Sequence[Tensor], tensor: Tensor, seconds: float | None) -> None:
        """Collective. Write the tensor of rank r to `outs[r]`; sizes may differ between ranks."""
        row = dense(tensor)
        sizes = [out.numel() for out in outs]
        if len(set(sizes)) == 1:
            whole = row.new_empty((self._size, row.numel()))
            self._gather(row, whole, seconds)
            parts: Sequence[Tensor] = list(whole)
        else:
            parts = self._exchange([row.view(-1)] * self._size, sizes, seconds, f"all_gather of {sizes}")
        for out, part in zip(outs, parts, strict=True):
            out.detach().copy_(part.view(out.shape))

    def gather(self, outs: Sequence[Tensor], tensor: Tensor, root: int, seconds: float | None) -> None:
        """Collective. On rank `root`, write the tensor of rank r to `outs[r]`."""
        row = dense(tensor).view(-1)
        empty = row[:0]
        parts = [row if q == root else empty for q in range(self._size)]
        counts = [row.numel() if self._rank == root else 0] * self._size
        label = f"gather {row.numel()} {_name(row)} to {root}"
        gathered = self._exchange(parts, counts, seconds, label)
        for out, part in zip(outs, gathered, strict=False):
            out.detach().copy_(part.view(out.shape))

    def scatter(self, out: Tensor, parts: Sequence[Tensor], root: int, seconds: float | None) -> None:
        """Collective. Write `parts[r]` of rank `root` to `out` of rank r."""
        empty = out.new_empty(0)
        sent = [dense(part).view(-1) for part in parts] or [empty] * self._size
        counts = [out.numel() if q == root else 0 for q in range(self._size)]
        label = f"scatter {out.numel()} {_name(out)} from {root}"
        received = self._exchange(sent, counts, seconds, label)
        out.detach().copy_(received[root].view(out.shape))

    def all_to_all(self, outs: Sequence[Tensor], parts: Sequence[Tensor], seconds: float | None) -> None:
        """Collective. Send `parts[r]` to rank r, and receive into `outs[r]` from rank r."""
        counts = [out.numel() for out in outs]
        sent = [dense(part).view(-1) for part in parts]
        self._agree_on_splits([part.numel() for part in sent], counts, _name(sent[0]), seconds)
        received = self._exchange(sent, counts, seconds, "all_to_all")
        for out, part in zip(outs, received, strict=True):
            out.detach().copy_(part.view(out.shape))

    def barrier(self, seconds: float | None) -> None:
        """Collective. Return when every rank has called it."""
        self._communicator.all_reduce(np.zeros(1, np.int32), label="barrier").wait(seconds)

    def _gather(self, row: Tensor, whole: Tensor, seconds: float | None, label: str = "") -> None:
        (array, dtype), (whole_array, _) = as_items(row), as_items(whole)
        self._communicator.all_gather(array, whole_array, label=f"{dtype}{label}").wait(seconds)

    def _exchange(
        self, parts: Sequence[Tensor], counts: Sequence[int], seconds: float | None, label: str
    ) -> list[Tensor]:
        """Send `parts[r]` to rank r; return the `counts[r]` elements that rank r has sent here."""
        arrays, dtypes = zip(*map(as_items, parts), strict=True)
        work = self._communicator.all_to_all_ragged(arrays, label=f"{label} {dtypes[0]}")
        work.wait(seconds)
        received = [_elements(part, parts[0]) for part in work.parts]
        for q, (part, count) in enumerate(zip(received, counts, strict=True)):
            if part.numel() != count:
                raise UsageError(
                    f"{self._who[q]} sent {part.numel()} elements where {self._who[self._rank]} expects {count}; give "
                    "both the same size"
                )
        return received

    def _agree_on_splits(self, sent: Sequence[int], expected: Sequence[int], dtype: str, seconds: float | None) -> None:
        """Raise an error on all ranks if one sends another number of elements than the receiver expects."""
        mine = np.array([sent, expected], np.int64)
        table = np.empty((self._size, 2, self._size), np.int64)
        self._communicator.all_gather(mine, table, label=f"splits of all_to_all {dtype}").wait(seconds)
        wrong = np.argwhere(table[:, 0] != table[:, 1].T)
        if len(wrong):
            sender, receiver = wrong[0]
            raise MismatchError(
                f"in all_to_all, {self._who[sender]} sends {table[sender, 0, receiver]:,} {dtype} to "
                f"{self._who[receiver]}, which expects {table[receiver, 1, sender]:,}; give both the same size"
            )


class _Noted:
    """A communicator that begins the labels of its operations with a note."""

    def __init__(self, communicator: Communicator, note: str) -> None:
        self.topology = communicator.topology
        self._communicator = communicator
        self._note = note

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._communicator, name)
        return lambda *args, label="", **given: method(*args, label=f"{self._note} {label}".rstrip(), **given)


# Functions that start these collectives while others run. They return None for tensors that need more than one
# operation.
STARTS: dict[Callable[..., object], Callable[..., Work | None]] = {
    Collectives.all_reduce: Collectives._start_all_reduce,
    Collectives.reduce_scatter: Collectives._start_reduce_scatter,
    Collectives.all_gather: Collectives._start_all_gather,
}


def of_each(collective: Callable[..., None]) -> Callable[..., None]:
    """Local. A function that takes lists of tensors and calls `collective` for one after the other; it keeps the name.

    Labels contain the length of the lists, so that ranks with lists of different lengths raise an error.
    """

    @wraps(collective)
    def run(collectives: Collectives, lists: Sequence[Sequence[Any]], *args: Any) -> None:
        for i, tensors in enumerate(zip(*lists, strict=True), 1):
            collective(collectives.noted(f"{i} of {len(lists[0])}"), *tensors, *args)

    return run


def _elements(part: Array, like: Tensor) -> Tensor:
    """The array `part`, which was sent as `as_items` says, as a flat tensor of the type of `like`."""
    # `view` refuses the strides of an empty array.
    return torch.from_numpy(part).view(like.dtype) if part.size else like.new_empty(0)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
