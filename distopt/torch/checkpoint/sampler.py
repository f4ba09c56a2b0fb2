"""A batch sampler that counts the samples that have been trained, not those that a loader has fetched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sized
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Sampler

from ...checks import check_integer
from ...data import ShardedSampler
from ...errors import UsageError
from ..private import LOADER_RESET, called_by

_log = logging.getLogger("distopt")


class ResumableSampler(ShardedSampler):
    """A batch sampler for `DataLoader(data, batch_sampler=...)` that can resume in the middle of an epoch.

    It deals out samples as `distopt.data.ShardedSampler` does. A loader's workers fetch batches ahead, so fetched
    samples do not count: `Checkpoint.step` counts the samples of a step.

    Args:
        data: the data set, or its number of samples.
        batch_size: samples per rank and step; with `shards`, per shard.
        group: the ranks (default: all, or this process alone without a process group).
        seed: the same on all ranks.
        shuffle: if False, samples keep their order in every epoch.
        tail: see `ShardedSampler`.
        partial_batch: whether the last batch of an epoch may be shorter, as by a loader's `drop_last=False`.
        batches_per_step: number of batches that each `Checkpoint.step` counts: 1 if it is called after every batch, n
            if it is called once for n batches, whose gradients an update accumulates.
        shards: see `ShardedSampler`.

    Attributes:
        consumed: number of samples of this epoch that all ranks together have trained on.
        batches_per_epoch: number of batches of a whole epoch; `len`, also that of the loader, counts those of an
            iteration, so it is less in an epoch that has resumed in its middle.

    Raises:
        UsageError: see `ShardedSampler`; or `data` is a sampler or a loader, whose order would be ignored.
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
        shards: int | None = None,
    ) -> None:
        """Local."""
        if isinstance(data, (Sampler, DataLoader)):
            raise UsageError(
                f"a ResumableSampler chooses the samples itself, so the order of a {type(data).__name__} would be "
                "ignored; pass the data set"
            )
        size = len(data) if isinstance(data, Sized) else data
        rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        super().__init__(
            size,
            world_size,
            rank,
            batch_size,
            seed,
            shuffle=shuffle,
            tail=tail,
            partial_batch=partial_batch,
            shards=shards,
        )
        self.batches_per_step = check_integer("batches_per_step", batches_per_step, 1)
        self._at_start: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[Any]:
        """The batches of the current epoch, lists of indices: after `set_states` the rest; see `ShardedSampler`.

        An iteration without a step, such as `next(iter(loader))`, leaves no trace when it is dropped.

        Raises:
            UsageError: a loader has it as `sampler`, and would make a batch of each `batch_size` batches.
        """
        if called_by(BatchSampler.__iter__.__code__):
            raise UsageError(
                "a ResumableSampler gives whole batches; pass it as DataLoader(data, batch_sampler=sampler), without "
                "batch_size"
            )
        # Its workers stay; those of a job that resumes would draw other numbers, from a new seed.
        if called_by(LOADER_RESET):
            return self._iteration()
        return super().__iter__()

    def _begin(self, iteration: Any) -> Iterator[Any]:
        # The loader has just drawn a seed for its workers. The interrupted epoch drew its seed before it was saved.
        if self._at_start is not None and self._first:
            self._at_start()
        batches = super()._begin(iteration)
        iteration.n_batches = len(self)
        return map(np.ndarray.tolist, batches)

    def _hand_out(self, place: int) -> None:
        """Count nothing, since loaders fetch ahead."""

    def _ended(self) -> None:
        """Leave the place: a loader that fetches ahead comes to the end before the steps do."""

    def _was_peek(self, iteration: Any) -> bool:
        return not iteration.n_steps

    def _dropped(self, iteration: Any) -> None:
        super()._dropped(iteration)
        # No error: a loop that ends early counts few steps as well, since its loader has fetched ahead.
        per_step = round(iteration.n_batches / max(iteration.n_steps, 1))
        if self.rank == 0 and iteration.has_ended and iteration.n_steps and per_step >= 2 * self.batches_per_step:
            _log.warning(
                f"{iteration.n_steps} steps were counted in an epoch of {iteration.n_batches} batches. If an update "
                "accumulates the gradients of several, make the sampler with ResumableSampler(..., "
                f"batches_per_step={per_step}); without it, a job that resumes trains on some batches twice"
            )

    def finish_step(self) -> None:
        """Local. Count the samples of one step on all ranks; `Checkpoint.step` calls this."""
        super().finish_step()
        trained = self.consumed + self.batches_per_step * self.batch_size * self.shards
        self.consumed = min(trained, self.size)  # the last batch may be shorter
        if (iteration := self._current()) is not None:
            iteration.n_steps += 1

    step = finish_step  # the name in scripts without a Checkpoint

    def continue_with(self, at_start: Callable[[], None]) -> None:
        """Local. Call `at_start` when an iteration begins in the middle of an epoch, until a step is counted."""
        self._at_start = at_start
