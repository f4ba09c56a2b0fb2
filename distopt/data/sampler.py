"""Which samples a rank trains on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..checks import check_count, check_integer
from ..errors import StateError, UsageError
from ..shards import block_of

TAILS = ("drop", "wrap")
ArrayT = TypeVar("ArrayT", bound="NDArray[Any]")


class ShardedSampler:
    """The batches of one rank, as index arrays into the data set.

    In every epoch, all ranks draw the same permutation from `seed` and the epoch, without communication. Rank r takes
    the elements r, r + world_size, r + 2 * world_size, ... The ranks' shares are therefore disjoint and equally long,
    all ranks take the same number of steps, and step s of all ranks together equals step s of one process with batches
    of `world_size * batch_size`.

    If `size` is a multiple of `world_size`, the shares contain every sample exactly once. Otherwise, `tail` determines
    what happens to the last `size % world_size` samples of the permutation:

    - "drop": they are left out of this epoch; with shuffling, the next epoch leaves out others.
    - "wrap": they are included, and the first `-size % world_size` samples of the permutation are repeated to fill the
      shares, so these samples have double weight.

    A share is divided into batches. Samples after the last full batch are left out of the epoch unless
    `partial_batch` is set; then the last batch is shorter, by the same amount on all ranks.

    With `shards`, the shards of a step play the part of ranks: the permutation is dealt to so many shards, a batch has
    `batch_size` samples of each shard of this rank, one shard after the other, and a step has the same samples for any
    number of ranks.

    An epoch can be interrupted and resumed in its middle, with another number of ranks or another batch size too: see
    `get_states`. Each iteration gives the rest of it, until a `Checkpoint` counts a step or an iteration ends. So a
    look, such as `next(iter(sampler))`, costs nothing, before a loop or inside of one.

    Args:
        size: number of samples in the data set.
        world_size: number of ranks.
        rank: this rank.
        batch_size: samples per rank and step; with `shards`, per shard.
        seed: the same on all ranks, at least 0.
        shuffle: if False, samples keep their order in every epoch.
        tail: one of `TAILS`.
        partial_batch: whether the last batch may be shorter.
        shards: number of shards of a step, as given to `DistOpt`; at least `world_size`.

    Attributes:
        epoch: the epoch that determines the permutation.
        consumed: number of samples of this epoch that all ranks together have been given.
        batches_per_epoch: number of batches of a whole epoch; `len` counts those of an iteration.

    Raises:
        UsageError: an argument is invalid, or a share does not fill one batch.
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
        shards: int | None = None,
    ) -> None:
        self.size = check_integer("the data set's size", size, 1)
        self.world_size, self.rank = _check_rank(rank, world_size)
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.seed = check_integer("seed", seed, 0)
        self.shuffle = shuffle
        self.partial_batch = partial_batch
        self.epoch = 0
        self._after_set_epoch: Callable[[], object] = _nothing
        self._before_iteration: Callable[[], object] = _nothing
        self._go_to(0)
        self._tail = tail
        self._given = shards
        self._mine()
        if tail not in TAILS:
            raise UsageError(f"unknown tail {tail!r}; choose one of {', '.join(TAILS)}")
        share = self._share(self.size)
        self.batches_per_epoch = self._batches(share)
        if self.batches_per_epoch == 0:
            who, one = ("ranks", "rank") if shards is None else ("shards", "shard")
            cure = f"use batch_size {share} or less, or fewer {who}" if share else f"use fewer {who}"
            raise UsageError(
                f"a batch of {self.batch_size} is larger than the share of a {one}: {self.size} samples over "
                f"{self.shards} {who} give {share} each; {cure}"
            )

    @property
    def shards(self) -> int:
        """Into how many parts the permutation is dealt: the argument, or the number of ranks."""
        return self.world_size if self._given is None else self._given

    def _mine(self) -> NDArray[np.int64]:
        """The parts of this rank."""
        return np.array(block_of(self.shards, self.rank, self.world_size), np.int64)

    def _go_to(self, place: int) -> None:
        """Have the next iteration begin at a place in the permutation; all samples before it are consumed."""
        self.consumed = self._first = self._began = place  # _began: where the iteration began that came last
        self._current: Callable[[], _Iteration | None] = _nothing  # a weak reference to that iteration

    def __len__(self) -> int:
        """Batches of the iteration that has begun last, or of the next one, the same on all ranks.

        They are `batches_per_epoch`, or fewer in an epoch that has resumed in its middle.
        """
        return self._batches(self._share(self.size - self._began))

    def set_epoch(self, epoch: int) -> None:
        """Select the permutation for the next iteration. Without this call, every epoch has the same order.

        A different epoch begins with its first sample.

        Raises:
            UsageError: `epoch` is negative.
        """
        epoch = check_integer("epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch = epoch
            self._go_to(0)
            self._after_set_epoch()

    def watch_epochs(self, after_set_epoch: Callable[[], object], before_iteration: Callable[[], object]) -> None:
        """Have these called when another epoch has been set, and when an iteration is made.

        `Checkpoint.resume` calls this.
        """
        self._after_set_epoch, self._before_iteration = after_set_epoch, before_iteration

    @property
    def epoch_is_over(self) -> bool:
        """Whether all batches of this epoch are consumed."""
        return self._batches(self._share(self.size - self.consumed)) == 0

    @property
    def epoch_ends(self) -> bool:
        """Whether one batch of this epoch is left."""
        return self._batches(self._share(self.size - self.consumed)) == 1

    def finish_epoch(self) -> None:
        """If all batches of this epoch are consumed, begin anew, as the next iteration would.

        `Checkpoint.save(epoch)` calls this for a new epoch: without `set_epoch`, states tell one epoch from the next by
        `consumed` alone.
        """
        if self.epoch_is_over:
            self._go_to(0)

    def finish_step(self) -> None:
        """Note that a training step has used all batches given so far; `Checkpoint.step` calls this."""
        self._first = 0

    def __iter__(self) -> Iterator[Any]:
        """The batches of the current epoch: disjoint int64 arrays of `batch_size` indices.

        After `set_states`, the rest of the epoch. An iteration begins with its first batch.
        """
        self._before_iteration()
        return self._iteration()

    def _iteration(self) -> Iterator[Any]:
        return _Iteration(self)

    def _begin(self, iteration: _Iteration) -> Iterator[Any]:
        """The batches of an iteration, which begins now."""
        iteration.before = self._current, self.consumed, self._began
        self._current, self.consumed, self._began = iteration.reference, self._first, self._first
        return self._deal(self._first)

    def _deal(self, place: int) -> Iterator[Any]:
        own = self._own(place)
        for start in range(0, self._batches(own.shape[1]) * self.batch_size, self.batch_size):
            batch = own[:, start : start + self.batch_size]
            place += batch.shape[1] * self.shards
            self._hand_out(place)
            yield batch.reshape(-1)

    def _ended(self) -> None:
        """An iteration has given all its batches."""
        self._first = 0

    def _dropped(self, iteration: _Iteration) -> None:
        """Go back to where the sampler was, if the iteration was only a peek."""
        if self._current is iteration.reference and self._was_peek(iteration):
            self._current, self.consumed, self._began = iteration.before

    def _was_peek(self, iteration: _Iteration) -> bool:
        outer = iteration.before[0]()
        return outer is not None and not outer.has_ended  # a loop that still runs

    def _hand_out(self, place: int) -> None:
        """Count the samples before `place`, which all ranks have been given."""
        self.consumed = place

    def _own(self, first: int) -> NDArray[np.int64]:
        """This rank's part of the permutation from the place `first` on: one row, or one for each of its shards."""
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.size)
        else:
            order = np.arange(self.size)
        rows = first + np.arange(self._share(self.size - first)) * self.shards
        own: NDArray[np.int64] = order[(rows + self._mine()[:, None]) % self.size]
        return own

    def _share(self, samples: int) -> int:
        """How many of `samples` samples a rank gets, or a shard."""
        return max(0, samples // self.shards if self._tail == "drop" else -(-samples // self.shards))

    def _batches(self, samples: int) -> int:
        """Number of batches that `samples` samples of a rank, or of a shard, make."""
        full, rest = divmod(samples, self.batch_size)
        return full + (self.partial_batch and rest > 0)

    # -- states ------------------------------------------------------------------------------------------------------
    def get_states(self) -> dict[str, int | bool]:
        """The progress of this epoch, over all ranks, and the values that determine the order of its samples.

        The batch that the iteration gave last counts as consumed: ask after the step that trains on it. Less than twice
        `size` is consumed, even where there are more ranks than samples and each sample is given several times.
        """
        return {
            "size": self.size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "consumed": min(self.consumed, 2 * self.size - 1),
        }

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Have the next iteration resume from the result of `get_states`, on any number of ranks.

        Raises:
            StateError: see `check_states`; nothing was changed.
        """
        self.check_states(states)
        self.epoch = check_count("epoch", states["epoch"])
        self._go_to(check_count("consumed", states["consumed"]))

    def check_states(self, states: Mapping[str, Any]) -> None:
        """Whether `set_states` would accept them.

        Raises:
            StateError: they are of another data set, seed or order, or not the states of a sampler.
        """
        own = self.get_states()
        if states.keys() != own.keys():
            raise StateError(f"these are not states of a sampler: {sorted(states)} in place of {sorted(own)}")
        for key in ("size", "seed", "shuffle"):
            if not np.array_equal(states[key], own[key]):
                raise StateError(f"the sampler's {key} is {own[key]}, that of the states {states[key]}")
        check_count("epoch", states["epoch"])
        # The last samples of an epoch may be repeated, so that all ranks have equally many: fewer than there are ranks.
        if check_count("consumed", states["consumed"]) >= 2 * self.size:
            raise StateError(f"the states have consumed {states['consumed']} of {self.size} samples")

    def __getstate__(self) -> dict[str, Any]:
        """For copies in other processes, where no iteration lives, and no `Checkpoint`."""
        nothing = dict.fromkeys(["_current", "_after_set_epoch", "_before_iteration"], _nothing)
        return {**self.__dict__, **nothing}


class _Iteration:
    """One iteration over a sampler. It begins with its first batch: a loader may make iterators that it never uses.

    Hazard: nothing that it refers to may refer to it, since a look ends when its last reference goes.

    Attributes:
        reference: a weak reference to this object, the same at all times.
        before: the attributes of the sampler that it has changed.
        has_ended: whether all batches have been given.
        n_steps: number of training steps that were counted since it began.
    """

    def __init__(self, sampler: ShardedSampler) -> None:
        self._sampler = sampler
        self._batches: Iterator[Any] | None = None
        self.reference = weakref.ref(self)
        self.before: tuple[Callable[[], _Iteration | None], int, int]
        self.has_ended = False
        self.n_steps = 0

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._sampler._begin(self)
        try:
            return next(self._batches)
        except StopIteration:
            if not self.has_ended:
                self.has_ended = True
                self._sampler._ended()
            raise

    def __del__(self) -> None:
        if self._batches is not None:
            self._sampler._dropped(self)


def _nothing() -> None:
    """A weak reference to nothing; and what is called where no `Checkpoint` watches."""


def data_partition(x: ArrayT, y: ArrayT, rank: int, world_size: int) -> tuple[ArrayT, ArrayT]:
    """The contiguous part of a data set that belongs to `rank`, as views.

    All parts have `len(x) // world_size` samples; the last `len(x) % world_size` samples are not used.

    Args:
        x: samples, along the first axis.
        y: labels, as many as samples.
        rank: this rank.
        world_size: number of ranks.

    Raises:
        UsageError: samples and labels differ in number, there are fewer samples than ranks, or the rank is invalid.
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
    world_size = check_integer("world_size", world_size, 1)
    rank = check_integer("rank", rank, 0)
    if rank >= world_size:
        raise UsageError(f"rank {rank} is outside 0 ... {world_size - 1}; check the arguments' order")
    return world_size, rank
