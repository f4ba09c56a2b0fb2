"""Steps in shards: what makes a step the same, to the bit, for any number of ranks.

A step has a fixed number of shards. Each has random numbers of its own, keyed by seed, step and shard; gradients meet
in a fixed tree (`codecs.Tree`); running statistics take in the shards in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np

from ..checks import check_integer
from ..codecs import Codec, CommunicationStatistics, Fp32, Tree, Verdict
from ..comm import Communicator
from ..comm.base import Array
from ..errors import StateError, UsageError
from ..launch.job.topology import Topology
from ..shards import block_of
from .step import GradientCounter, Step


class RunningStatistics:
    """Running means and variances of one layer, during a step in shards.

    Args:
        arrays: gives both, of one dimension.
        momentum: weight of a batch in them.
        passed: called at the end of a step with the number of batches that all ranks have taken in.

    Attributes:
        noted: what the batches of a shard add to them; emptied after each shard.
        waits: whether a shard is at work, so that batches are noted.
    """

    def __init__(
        self, arrays: Callable[[], tuple[Array, Array]], momentum: float, passed: Callable[[int], object] | None = None
    ) -> None:
        self.arrays, self.momentum, self.passed = arrays, momentum, passed
        self.noted: list[Array] = []
        self.waits = False

    def note(self) -> tuple[Array, Array]:
        """Local. The arrays that a layer adds its batch to: zeros while a shard is at work, else mean and variance."""
        mean, var = self.arrays()
        if not self.waits:
            return mean, var
        self.noted += np.zeros_like(mean), np.zeros_like(var)
        return self.noted[-2], self.noted[-1]

    def take_in(self, batches: Sequence[Array]) -> None:
        """Local. Fold in the batches, in their order; each has an array of means, followed by one of variances."""
        for place, added in enumerate(batches):
            running = self.arrays()[place % 2]
            running *= 1 - self.momentum
            running += added
        if self.passed is not None:
            self.passed(len(batches) // 2)


class Shards:
    """The shards of the steps of one engine.

    Args:
        count: number of shards of a step; at least that of the ranks.
        seed: of random numbers.
        topology: of the ranks.
        facts: what results depend on besides, by name; the same on all ranks.

    Attributes:
        count: see above.
        seed: see above.
        facts: see above, with count and seed.
        mine: the shards of this rank.
        current: the shard whose gradients come next; None outside of `walk`, and after they came.

    Raises:
        UsageError: there are fewer shards than ranks, or a number is not an integer in its range.
    """

    def __init__(self, count: int, seed: int, topology: Topology, **facts: Any) -> None:
        self.mine = block_of(count, topology.rank, topology.world_size)
        self.count, self.seed = int(count), check_integer("seed", seed, 0)
        if self.seed >> 63:
            raise UsageError(f"the seed {seed} does not fit saved states; choose one below 2**63")
        self.facts = {"shards": self.count, "seed": self.seed, **facts}
        self.current: int | None = None
        self._codec = Tree(self.count)
        self._statistics: dict[int, RunningStatistics] = {}
        self._streams: list[Array] = []
        self._step: Step | None = None  # which awaits the next shard

    @property
    def precedes_last(self) -> bool:
        """Local. Whether a shard is at work, and is not the last one of this rank."""
        return self.current is not None and self.current < self.mine.stop - 1

    def codec_for(self, codec: Codec, clip: float | None) -> Tree:
        """Local. The codec of a step in shards.

        Raises:
            UsageError: no shard is at work, or the step is of another kind than the mean of float32.
        """
        if self.current is None:
            raise UsageError(
                "with shards=, each loss is that of one shard: call the model once in each turn of "
                "`for part in optimizer.shards(batch)`"
            )
        if not isinstance(codec, Fp32) or clip is not None:
            what = "a limit of single elements (clip)" if isinstance(codec, Fp32) else f"codec {codec.kind}"
            raise self.refusal(what)
        return self._codec

    @staticmethod
    def refusal(what: str) -> UsageError:
        """Local. An error that says that `what` depends on the number of ranks."""
        return UsageError(
            f"{what} would make results depend on the number of ranks; leave shards= out, or use codec fp32 and plain "
            "steps"
        )

    # -- the loop over shards ----------------------------------------------------------------------------------------
    def walk(
        self,
        batch: Sequence[Any],
        done: CommunicationStatistics,
        around: Callable[[Sequence[int]], AbstractContextManager[object]],
    ) -> Iterator[Any]:
        """Collective with the steps in it. The parts of a batch of this rank, one for each of its shards.

        Args:
            batch: arrays, tensors or lists, as long as each other, cut along their first axis.
            done: counts the steps.
            around: the context of each turn, from the seed of its random numbers: seed, step and shard.

        Yields:
            A tuple of parts, or one part where the batch is one array.

        Raises:
            UsageError: the lengths differ, or cannot be cut into this rank's shards equally; or the body has not given
                gradients.
        """
        lengths = {len(array) for array in batch}
        each, rest = divmod(min(lengths, default=0), len(self.mine))
        if len(lengths) != 1 or rest or not each:
            raise UsageError(
                f"a batch of {' and '.join(map(str, sorted(lengths))) or 'no arrays'} samples is not cut into "
                f"{len(self.mine)} equal shards on this rank; take the batches of ShardedSampler(..., "
                f"shards={self.count})"
            )
        self._streams, step, self._step = [], self._step, None
        for statistics in self._statistics.values():
            statistics.noted.clear()
        if step is not None:
            step.abandon("not all shards of the step were computed")
        number = done.steps
        for place, shard in enumerate(self.mine):
            self._begin(shard)
            parts = tuple(array[place * each : (place + 1) * each] for array in batch)
            try:
                with around((self.seed, number, shard)):
                    yield parts[0] if len(parts) == 1 else parts
                if self.current is not None:
                    raise UsageError(f"shard {shard} has given no gradients; each turn of the loop takes one loss")
            finally:
                self._begin(None)

    def resumed(self) -> Step | None:
        """Local. The step that awaits the current shard; None before this rank's first one."""
        step, self._step = self._step, None
        return None if self.current is None else step

    def fold(
        self, step: GradientCounter, grads: Mapping[int, Array], unused: Literal["raise", "zero"] = "raise"
    ) -> None:
        """Local. Take in the gradients of the current shard, but for the last, which are declared `final`.

        Args:
            step: awaits the next shard afterwards.
            grads: by id of the parameter.
            unused: see `GradientCounter.finish`.

        Raises:
            UsageError: a parameter has no place; or see `unused`.
        """
        assert isinstance(step, Step)
        assert self.current is not None
        if grads.keys() - step.layout.bucket_of.keys():
            raise UsageError("a parameter was not part of the loss of the first shard; every shard uses the same")
        for bucket, state in zip(step.layout.buckets, step.states, strict=True):
            leaf = [grads.get(id(param)) for param in bucket.params]
            if unused == "raise" and (missing := sum(grad is None for grad in leaf)):
                raise step.unreached(bucket, missing)
            self._codec.fold(state, self.current, leaf)
        self._end()
        self._step = step

    # -- running statistics ------------------------------------------------------------------------------------------
    def add_statistics(self, owner: object, statistics: RunningStatistics) -> RunningStatistics:
        """Local, in the same order on all ranks. Have the statistics of a layer, their owner, folded in by shards."""
        return self._statistics.setdefault(id(owner), statistics)

    def _begin(self, shard: int | None) -> None:
        """Local. Let a shard be the current one, or none."""
        self.current = shard
        for statistics in self._statistics.values():
            statistics.waits = shard is not None

    def _end(self) -> None:
        """Local. The gradients of the current shard have come."""
        self._begin(None)
        for statistics in self._statistics.values():
            count = np.full(1, len(statistics.noted), statistics.arrays()[0].dtype)
            self._streams += count, *statistics.noted
            statistics.noted.clear()

    def end_last(self, communicator: Communicator, verdict: Verdict) -> None:
        """Collective. After the last shard: take the batches of all into the running statistics, if none was bad."""
        self._end()
        if not self._statistics or verdict is not None:
            return
        streams, self._streams = self._streams, []
        work = communicator.all_gather_ragged(np.concatenate(streams), label="running statistics")
        work.wait()
        stream, at = np.concatenate(work.parts), 0  # ranks have contiguous blocks of shards
        batches: dict[int, list[Array]] = {key: [] for key in self._statistics}
        for _ in range(self.count):
            for key, statistics in self._statistics.items():
                length, count = statistics.arrays()[0].size, int(stream[at])
                values = stream[at + 1 : at + 1 + count * length]
                batches[key].extend(values.reshape(count, length))
                at += 1 + count * length
        for key, statistics in self._statistics.items():
            statistics.take_in(batches[key])

    # -- saved states ------------------------------------------------------------------------------------------------
    def state(self) -> Array:
        """Local. Number of shards and seed, for saved states."""
        return np.array([self.count, self.seed], np.int64)

    def check_state(self, state: Array) -> None:
        """Local. Whether steps may continue from a state.

        Raises:
            StateError: it is of another number of shards, or another seed.
        """
        if list(state) != [self.count, self.seed]:
            raise StateError(
                f"the states are of shards={state[0]}, seed={state[1]}, not shards={self.count}, seed={self.seed}; "
                "resume with the same, whatever the number of ranks"
            )
