"""A batch sampler that counts samples when they have been trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch.distributed as dist

from ...data import ShardedSampler
from ...errors import check_integer


class ResumableSampler(ShardedSampler):
    """A batch sampler for `DataLoader(data, batch_sampler=...)` that can resume in the middle of an epoch.

    Samples are dealt out as `distopt.data.ShardedSampler` does. A loader's workers fetch batches before they are
    needed, so what they were given does not count: `Checkpoint.step` counts what was trained.

    Args:
        data: the data set, or how many samples it has.
        batch_size: samples per rank and step.
        group: the ranks (default: all; one, if there is no process group).
        seed: the same on all ranks.
        shuffle: if False, samples keep their order in every epoch.
        tail: see `ShardedSampler`.
        partial_batch: whether the last batch of an epoch may be shorter; a loader's `drop_last=False`.
        batches_per_step: how many batches a step trains on, where gradients of several are accumulated.

    Attributes:
        consumed: number of samples of this epoch that all ranks together have trained on.

    Raises:
        UsageError: see `ShardedSampler`.
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        shuffle: bool = True,
        tail: str = "drop",
        partial_batch: bool = False,
        batches_per_step: int = 1,
    ) -> None:
        """Local."""
        size = len(data) if isinstance(data, Sized) else data
        rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        super().__init__(
            size, world_size, rank, batch_size, seed, shuffle=shuffle, tail=tail, partial_batch=partial_batch
        )
        self.batches_per_step = check_integer("batches_per_step", batches_per_step, 1)
        self._at_start: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[Any]:
        """The batches of the current epoch, lists of indices; see `ShardedSampler`."""
        # A loader has drawn a seed for its workers by now, which the interrupted epoch had done at its own start.
        at_start, self._at_start = self._at_start, None
        if at_start is not None and self._first:
            at_start()
        for batch in super().__iter__():
            yield batch.tolist()

    def _hand_out(self, samples: int) -> None:
        """Count nothing: the loader asks ahead."""

    def step(self) -> None:
        """Local. Count the batches of one step as trained."""
        trained = self.consumed + self.batches_per_step * self.batch_size * self.world_size
        self.consumed = min(trained, self.size)  # the last batch may be shorter

    def continue_with(self, at_start: Callable[[], None]) -> None:
        """Local. If the next iteration begins in the middle of an epoch, call `at_start` at its beginning."""
        self._at_start = at_start
