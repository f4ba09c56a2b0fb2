"""Moves DDP's buckets, and other storages that backward passes reduce repeatedly, into shared memory.

There the communicator reduces them in place, without a copy. PyTorch changes the memory that the storage points to, so
all tensors that view the storage move with it. A storage stays where it is if code may know its address: if it is
shared, or if PyTorch marks it as not resizable, because it was made of an array or a file, or an array was made of it
(`Tensor.numpy`). A storage that has moved is not resizable either.
"""

from __future__ import annotations

import logging
import math
import mmap
import resource
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from ...comm.base import DTYPES
from ...comm.shm import available_bytes
from ..private import StorageWeakRef, key_of, take_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...comm.base import Array, Communicator

_log = logging.getLogger("distopt")
_Kind: TypeAlias = tuple[str, int]  # type and number of a storage's elements

LEAST_BYTES = 64 << 10  # a smaller storage is copied faster than it is moved
_SHORTEST_PERIOD, _LONGEST_PERIOD = 8, 32  # operations between two agreements
_NO, _HAS_MEMORY, _NEEDS_MEMORY = range(3)  # a rank's wish to move the storage of an operation


@dataclass
class _Seen:
    """A storage that has been reduced in a backward pass."""

    alive: StorageWeakRef  # while this exists, no other storage has its key
    kind: _Kind
    has_memory: bool = False  # has been given memory, and may have moved since
    memory: Array | None = None  # the storage moves there when it is next reduced


class SharedBuckets:
    """Moves the storages that a channel reduces repeatedly.

    Making shared memory is collective, but each rank alone knows which of its storages it has seen before. So every few
    operations the ranks start to gather which storages each would move. At the next such time all ranks know the
    result, and make the memory that is missing. Before, and if one rank has a new storage or one that must stay, the
    communicator copies. A rank may decide against a move even after memory was made for it, since the communicator
    looks at addresses.

    Args:
        communicator: of the channel.
        post: adds an action to the channel's operations, and returns its work.
        timeout: of the group, in seconds.
    """

    def __init__(self, communicator: Communicator, post: Callable[[Callable[[], object]], Any], timeout: float) -> None:
        self._communicator = communicator
        self._post = post
        self._timeout = timeout
        self._size = communicator.topology.world_size
        self._period = _SHORTEST_PERIOD
        self._seen: dict[int, _Seen] = {}
        self._wishes: list[int | None] = []  # the storage to move in each operation since the last agreement
        self._agreement: tuple[Any, list[int | None], Array] | None = None
        self._free: dict[_Kind, list[Array]] = {}
        self._has_warned = False

    def consider(self, tensor: torch.Tensor, *, in_backward: bool) -> None:
        """Collective, before every all_reduce. Move the storage of `tensor` if the ranks have agreed on that."""
        if tensor.layout != torch.strided or tensor.nbytes < LEAST_BYTES:
            return
        if len(self._wishes) == self._period:
            self._grant()
            self._agree()
        self._wishes.append(self._wish(tensor) if in_backward else None)

    def _wish(self, tensor: torch.Tensor) -> int | None:
        """The storage of `tensor` if it is to move. Moves it if it has memory."""
        dtype, storage = str(tensor.dtype).removeprefix("torch."), tensor.untyped_storage()
        if dtype not in DTYPES or storage.nbytes() != tensor.nbytes or not tensor.is_contiguous():
            return None
        if _is_known(storage):
            return None
        key, kind = key_of(storage), (dtype, tensor.numel())
        seen = self._seen.get(key)
        if seen is None:
            self._seen[key] = _Seen(StorageWeakRef(storage), kind)
        elif seen.kind != kind:
            return None
        elif seen.memory is not None:
            self._move(tensor, seen)
        elif not (seen.has_memory or key in self._wishes or self._asks_for(key)) and self._fits(tensor.nbytes):
            return key
        return None

    def _asks_for(self, key: int) -> bool:
        return self._agreement is not None and key in self._agreement[1]

    def _move(self, tensor: torch.Tensor, seen: _Seen) -> None:
        memory, own = seen.memory, tensor.untyped_storage()
        view = memory.view()  # type: ignore[union-attr] # lives as long as the storage points to it
        wire = torch.from_numpy(view)
        wire.view(tensor.dtype)[: tensor.numel()].copy_(tensor.detach().view(-1))
        if _is_known(own):  # since now, through another thread
            return
        seen.memory, old = None, take_memory(own, wire.untyped_storage())
        # `old` lives as long as the view: other libraries may read it through views that PyTorch does not know.
        free = self._free.setdefault(seen.kind, [])
        weakref.finalize(view, _give_back, free, memory, old).atexit = False

    def _agree(self) -> None:
        """Collective. Start to gather the wishes of all ranks."""
        for key, seen in tuple(self._seen.items()):
            if seen.alive.expired():
                del self._seen[key]
                if seen.memory is not None:
                    self._free[seen.kind].append(seen.memory)
        free = {kind: len(memories) for kind, memories in self._free.items()}
        said = np.zeros(len(self._wishes), np.int64)
        for i, wish in enumerate(self._wishes):
            if wish in self._seen:
                kind = self._seen[wish].kind
                free[kind] = free.get(kind, 0) - 1
                said[i] = _NEEDS_MEMORY if free[kind] < 0 else _HAS_MEMORY
        table = np.empty((self._size, len(said)), np.int64)
        self._wishes, wishes = [], self._wishes
        all_gather = partial(self._communicator.all_gather, said, table, label="wire memory")
        self._agreement = self._post(lambda: all_gather().wait(self._timeout)), wishes, table

    def _grant(self) -> None:
        """Collective. Give memory to the storages that all ranks wish to move."""
        if self._agreement is None:
            return
        (work, wishes, table), self._agreement = self._agreement, None
        work.wait()
        self._period = _SHORTEST_PERIOD if table.all(axis=0).any() else min(2 * self._period, _LONGEST_PERIOD)
        for key, said in zip(wishes, table.T, strict=True):
            if said.min() == _NO or key is None:
                continue
            seen = self._seen[key]
            free = self._free.setdefault(seen.kind, [])
            if said.max() == _NEEDS_MEMORY:
                dtype, count = seen.kind[0], _with_room(seen.kind[1])
                self._post(lambda: free.append(self._communicator.empty(count, dtype))).wait()  # noqa: B023
            seen.has_memory, seen.memory = True, free.pop()

    def _fits(self, n_bytes: int) -> bool:
        """Whether there are `n_bytes` of memory for each rank of this host. Logs a notice if not."""
        n_bytes *= self._communicator.topology.local_size
        fits = resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
        fits = fits and available_bytes() > 2 * n_bytes
        if fits:
            try:
                mmap.mmap(-1, n_bytes).close()
            except OSError:
                fits = False
        if not fits and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "rank %d: %d MiB of memory for reducing buckets without copies are not available; they are copied",
                *(self._communicator.topology.rank, n_bytes >> 20),
            )
        return fits


def _is_known(storage: torch.UntypedStorage) -> bool:
    """Whether other code may know the address of the storage."""
    return storage.is_shared() or not storage.resizable()


def _with_room(count: int) -> int:
    """The next square number. PyTorch's batched PowerSGD resizes buckets to it; moved storages need the room."""
    return (math.isqrt(count - 1) + 1) ** 2


def _give_back(free: list[Array], memory: Array, old: torch.UntypedStorage) -> None:  # noqa: ARG001
    free.append(memory)
