"""Which samples a rank trains on."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["TAILS", "ShardedSampler", "data_partition"]

TAILS = ("drop", "wrap")
ArrayT = TypeVar("ArrayT", bound="NDArray[Any]")


class ShardedSampler:
    """The batches of one rank, as index arrays into the data set.

    Every epoch all ranks draw the same permutation from `seed` and the epoch, without communication, and deal it out
    like cards: rank r takes places r, r + world_size, r + 2 * world_size, ... Shards are therefore disjoint and of
    one length, all ranks take the same number of steps, and step s of all ranks together is step s of one process
    with batches of `world_size * batch_size`.

    Where `size` is a multiple of `world_size`, the shards hold every sample exactly once. Otherwise `tail` decides
    about the last `size % world_size` samples of the permutation:

    - "drop": they are left out; every other sample is in exactly one shard, and shuffling leaves out others next time.
    - "wrap": all are dealt out, and the first samples of the permutation once more, to fill the shards; the
      `-size % world_size` samples that come twice weigh twice.

    Batches are cut from the shard. The samples after the last full batch are left out of the epoch, unless
    `partial_batch` asks for a shorter last batch, which is equally short on all ranks.

    Args:
        size: samples in the data set.
        world_size: ranks that share them.
        rank: this rank.
        batch_size: samples per rank and step.
        seed: the same on all ranks, at least 0.
        shuffle: False deals out the samples in their own order, the same every epoch.
        tail: one of `TAILS`.
        partial_batch: whether the last batch may be shorter.

    Raises:
        UsageError: an argument cannot be used, or a shard does not fill one batch.
    """

    def __init__(
        self,
        size: int,
        world_size: int,
        rank: int,
        batch_size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        tail: str = "drop",
        partial_batch: bool = False,
    ) -> None:
        self.size = _at_least("the data set's size", size, 1)
        self.world_size, self.rank = _check_rank(rank, world_size)
        self.batch_size = _at_least("batch_size", batch_size, 1)
        self.seed = _at_least("seed", seed, 0)
        self.shuffle = shuffle
        self.partial_batch = partial_batch
        self.epoch = 0
        if tail not in TAILS:
            raise UsageError(f"unknown tail {tail!r}; choose one of {', '.join(TAILS)}")
        self.shard_size = self.size // self.world_size if tail == "drop" else -(-self.size // self.world_size)
        if len(self) == 0:
            raise UsageError(
                f"a batch of {self.batch_size} is larger than a rank's shard: {self.size} samples over "
                f"{self.world_size} ranks give {self.shard_size} each; "
                + (
                    f"use batch_size {self.shard_size} or less, or fewer ranks"
                    if self.shard_size
                    else "use fewer ranks"
                )
            )

    def __len__(self) -> int:
        """Batches per epoch, the same on all ranks."""
        full, rest = divmod(self.shard_size, self.batch_size)
        return full + (self.partial_batch and rest > 0)

    def set_epoch(self, epoch: int) -> None:
        """Local. Choose the permutation of the next iteration. Without this call every epoch has the same order.

        Raises:
            UsageError: `epoch` is negative.
        """
        self.epoch = _at_least("epoch", epoch, 0)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """The batches of the epoch that was set: int64 arrays of `batch_size` indices, disjoint."""
        shard = self.shard()
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield shard[start : start + self.batch_size]

    def shard(self) -> NDArray[np.int64]:
        """Local. The `shard_size` indices of this rank in the epoch that was set, in the order of use."""
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.size)
        else:
            order = np.arange(self.size)
        places = np.arange(self.rank, self.shard_size * self.world_size, self.world_size)
        return order[places % self.size]


def data_partition(x: ArrayT, y: ArrayT, rank: int, world_size: int) -> tuple[ArrayT, ArrayT]:
    """Local. The contiguous part of a data set that is `rank`'s, as views.

    All parts have `len(x) // world_size` samples; the last `len(x) % world_size` samples are in no part.

    Args:
        x: samples, along the first axis.
        y: labels, as many as samples.
        rank: this rank.
        world_size: ranks that share the samples.

    Raises:
        UsageError: samples and labels differ in number, there are fewer than ranks, or the rank is not one of them.
    """
    world_size, rank = _check_rank(rank, world_size)
    if len(x) != len(y):
        raise UsageError(f"{len(x)} samples have {len(y)} labels; give one label per sample")
    count = len(x) // world_size
    if count == 0:
        raise UsageError(f"{len(x)} samples cannot be shared by {world_size} ranks; use fewer ranks")
    part = slice(rank * count, (rank + 1) * count)
    return x[part], y[part]  # type: ignore[return-value]  # a slice of an array has the type of the array


def _check_rank(rank: int, world_size: int) -> tuple[int, int]:
    world_size = _at_least("world_size", world_size, 1)
    rank = _at_least("rank", rank, 0)
    if rank >= world_size:
        raise UsageError(f"rank {rank} is outside 0 ... {world_size - 1}; check the arguments' order")
    return world_size, rank


def _at_least(name: str, value: int, minimum: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum:
        raise UsageError(f"{name} is {value!r}; it must be an integer of at least {minimum}")
    return number
