"""DistOpt: where rank, transport and codec meet an optimizer.

The way of a gradient: `autograd.backward` writes it into its bucket and yields it (`_full_buckets`, the one loop over
gradients); when the bucket is full, its reducer encodes it and starts the collective (`reduce_and_update`); `_wait`
leaves the mean over ranks where the gradient was, and the wrapped optimizer applies it (`_update`).
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from . import comm, compress, launch
from .errors import GradientError, StateError, UsageError
from .nn import autograd
from .sync.agreement import check_same_model, check_same_values
from .sync.bucket import Bucket, Layout
from .sync.placement import device_of
from .sync.stats import CommunicationStatistics
from .sync.uneven import RollCall

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from .comm import Communicator
    from .compress import Codec, Reduction
    from .launch.job import Job
    from .nn.device import Device
    from .nn.optim import Optimizer
    from .nn.tensor import Tensor
    from .sync.bucket import LayoutStates

__all__ = ["DEFAULT_THRESHOLD", "STRATEGIES", "DistOpt", "NonFinite"]

NonFinite: TypeAlias = Literal["raise", "skip", "ignore"]

DEFAULT_THRESHOLD = 2097152  # elements; SINGA's default
PARTIAL = "partialUpdate"
STRATEGIES = (*compress.CODECS, PARTIAL)

log = logging.getLogger("distopt")


class DistOpt:
    """An optimizer whose gradients are averaged over the ranks of a job.

    Args:
        opt: the optimizer to wrap; it applies the averaged gradients.
        job: this rank's membership (default: found from the launcher, see `distopt.launch.join`).
        communicator: how bytes move (default: the best one for the job, see `distopt.comm.create`).
        compression: what is sent: a codec, or the name of one (see `distopt.compress`).
        threshold: bucket size in elements, see `distopt.sync.bucket.plan`.
        partition_size: size in elements of the partitions of a partial update (default: `threshold`).
        non_finite: what to do about a gradient that is NaN or infinite on any rank. "raise" a GradientError on all
            ranks; "skip" the update of this step on all ranks, with a warning; "ignore" it: fp32 then does not look,
            and the other codecs, which cannot carry such a value, raise.

    Attributes:
        world_size: number of ranks in the job.
        global_rank: number of this process in the job.
        local_rank: number of this process on its host.
        communicator: the communicator in use.
        opt: the wrapped optimizer.
        compression: the codec of `opt(loss)`. Another one may be assigned between two steps, on all ranks.
    """

    def __init__(
        self,
        opt: Optimizer,
        *,
        job: Job | None = None,
        communicator: Communicator | None = None,
        compression: Codec | str = "fp32",
        threshold: int = DEFAULT_THRESHOLD,
        partition_size: int | None = None,
        non_finite: NonFinite = "raise",
    ) -> None:
        """Collective."""
        if non_finite not in get_args(NonFinite):
            raise UsageError(f"non_finite={non_finite!r} is not one of {', '.join(get_args(NonFinite))}")
        self.compression = compress.create(compression) if isinstance(compression, str) else compression
        if communicator is None:
            communicator = comm.create(job or launch.join())
        self.opt = opt
        self.communicator = communicator
        self.world_size = communicator.topology.world_size
        self.global_rank = communicator.topology.rank
        self.local_rank = communicator.topology.local_rank
        self.threshold = threshold
        self.partition_size = threshold if partition_size is None else partition_size
        self.non_finite = non_finite
        self._attached: set[int] = set()
        self._layouts: dict[int, Layout] = {}  # by threshold
        self._layout: Layout | None = None  # the one where autograd writes
        self._steps = 0
        self._skipped = 0
        self._partition = 0  # the next one to be averaged
        self._drifted = False  # whether the ranks' parameters differ
        self._own_slots = False  # whether the ranks' momentum and the like differ
        self._unclaimed: dict[int, LayoutStates] = {}  # loaded, by threshold
        self._roll_call: RollCall | None = None  # inside `join`

    def __call__(self, loss: Tensor) -> None:
        """Collective. One training step from `loss`: backward, average, update."""
        self.reduce_and_update(loss, self.compression, self.threshold)

    def attach(self, params: Iterable[Tensor]) -> None:
        """Collective. Check that all ranks train the same model, and give all of them the parameters of rank 0.

        `Model` calls it as soon as it has both parameters and optimizer. A script without `Model` calls it before its
        first forward pass, or starts every rank from equal parameters.

        Raises:
            MismatchError: names, shapes or types differ; the message names the ranks and the first difference.
        """
        params = list(params)
        check_same_model(self.communicator, params)
        works = [self.communicator.broadcast(p.data, label=str(p.name)) for p in params]
        for work in works:
            work.wait()
        self._attached = {id(p) for p in params}

    @property
    def device(self) -> Device:
        """Local. Where to put the model; see `placement.device_of`."""
        return device_of(self.communicator)

    # -- steps -------------------------------------------------------------------------------------------------------
    def step_by(self, strategy: str, loss: Tensor, *, spars: float = 0.05, corr: bool = True) -> None:
        """Collective. One training step by a strategy that is chosen by name, as command-line options do.

        Args:
            strategy: one of `STRATEGIES`. It may change from step to step.
            loss: what to differentiate.
            spars: share of the elements (sparseTopK) or threshold (sparseThreshold).
            corr: error feedback for the sparse strategies.

        Raises:
            UsageError: no strategy has that name.
        """
        if strategy == PARTIAL:
            self.update_partially(loss, self.partition_size)
        elif strategy in STRATEGIES:
            self.reduce_and_update(loss, compress.create(strategy, spars=spars, corr=corr), self.threshold)
        else:
            raise UsageError(f"unknown strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")

    def reduce_and_update(
        self, loss: Tensor, codec: Codec, threshold: int = DEFAULT_THRESHOLD, clip: float | None = None
    ) -> None:
        """Collective. Average the gradients of `loss` over the ranks, then update the parameters.

        Args:
            loss: what to differentiate.
            codec: what is sent. Its options, and its kind, may change from step to step, alike on all ranks: a kind
                that returns goes on from the residuals that it has left.
            threshold: bucket size in elements.
            clip: limit every element of a gradient to [-clip, clip] before it is sent.

        Raises:
            GradientError: see `DistOpt.non_finite`; on all ranks, and no parameter has been changed.
            UsageError: the set of parameters under `loss` is not that of the first step, or `clip` is not positive.
        """
        if clip is not None and not clip > 0:
            raise UsageError(f"a clipping value of {clip} leaves nothing of a gradient; pass a positive one")
        weight = 1.0 if self._roll_call is None else self._roll_call.step(codec, threshold, clip)
        self._leave_partial()
        layout = self._begin_step(threshold, loss)
        self._reduce_buckets(self._full_buckets(loss, layout), layout, codec, clip, weight)

    def _reduce_buckets(
        self, buckets: Iterable[Bucket], layout: Layout, codec: Codec, clip: float | None, weight: float
    ) -> None:
        started = []
        for bucket in buckets:
            if clip is not None:
                bucket.flat.clip(-clip, clip, out=bucket.flat)
            started.append((bucket, bucket.reducer(codec).start()))
        # All are waited for, even after an error: the other ranks have started them too.
        errors = [self._wait(bucket, reduction) for bucket, reduction in started]
        if self._judge(next(filter(None, errors), None)):
            if weight != 1:
                for bucket in layout.buckets:
                    bucket.flat *= weight
            self._update(layout)

    def update_partially(self, loss: Tensor, threshold: int = DEFAULT_THRESHOLD) -> None:
        """Collective. Update the parameters by this rank's own gradients, then average one partition of them.

        The partitions are the buckets; successive steps visit them in a cycle. In between the ranks' parameters drift
        apart: call `synchronize` before evaluating or saving.

        Args:
            loss: what to differentiate.
            threshold: partition size in elements.

        Raises:
            GradientError: see `DistOpt.non_finite`; on all ranks, and no parameter has been changed.
            UsageError: the set of parameters under `loss` is not that of the first step.
        """
        if self._roll_call is not None:
            raise UsageError("partial updates need all ranks at every step; use another strategy inside DistOpt.join")
        layout = self._begin_step(threshold, loss)
        for bucket in self._full_buckets(loss, layout):
            bucket.keep_local()
        if self.non_finite != "ignore" and not self._judge(self._compare(layout)):
            return
        self._drifted = self._own_slots = True
        self._update(layout)
        layout.buckets[self._partition % len(layout.buckets)].average_params()
        self._partition += 1

    def synchronize(self) -> None:
        """Collective. Make the parameters of all ranks equal to their mean, where partial updates have let them drift.

        Call it before evaluating or saving; for other strategies it does nothing.
        """
        if self._drifted and self._layout is not None:
            for bucket in self._layout.buckets:
                bucket.average_params()
            self._drifted = False

    def _leave_partial(self) -> None:
        """Collective. Make the ranks equal after partial updates: equal gradients then keep them so."""
        self.synchronize()
        if self._own_slots:
            states = self.opt.get_states()
            for name, array in states.items():
                if array.dtype.kind == "f":
                    self.communicator.all_reduce(array, "mean", label=name).wait()
            self.opt.set_states(states)
            self._own_slots = False

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Collective. Let ranks take different numbers of steps in the body of a `with`.

        A rank that leaves the body waits in it until all have left. Meanwhile it contributes gradients of zero to the
        steps of the others and applies the same updates, so that the ranks end with equal parameters. A step averages
        over the ranks that still have data. Every rank needs at least one batch; and all take the same kind of step,
        by any codec without error feedback. Other collectives must stay outside of the body.

        It costs one exchange of 16 bytes per rank and step. An exception in the body of one rank is no end of its data:
        it leaves at once, and the others get an error as soon as the rank closes or ends.

        Raises:
            UsageError: a rank had no batch, or a step is of a kind that cannot be taken without all ranks.
            MismatchError: the ranks took different kinds of steps.
        """
        if self._roll_call is not None:
            raise UsageError("DistOpt.join was called inside of DistOpt.join; leave the outer one first")
        roll_call = self._roll_call = RollCall(self.communicator)
        try:
            yield
            while weight := roll_call.without_data():
                codec, threshold, clip = roll_call.last
                layout = self._begin_step(threshold)
                self._reduce_buckets(layout.zeros(), layout, codec, clip, weight)
        finally:
            self._roll_call = None

    # -- the loop ----------------------------------------------------------------------------------------------------
    def _full_buckets(self, loss: Tensor, layout: Layout) -> Iterator[Bucket]:
        """Run backward; yield each bucket when its gradients are final, while the pass still has to finish."""
        under_way = False
        for param, _ in autograd.backward(loss, pauses=layout.last):
            bucket = layout.bucket_of(param)
            if bucket.add():
                yield bucket
                under_way = True
            elif under_way:
                self.communicator.progress()
        layout.check_complete()

    def _begin_step(self, threshold: int, loss: Tensor | None = None) -> Layout:
        """`loss` is needed in the first step of a bucket size alone."""
        layout = self._layouts.get(threshold)
        if layout is None:
            assert loss is not None
            layout = self._layouts[threshold] = self._new_layout(loss, threshold)
        if layout is not self._layout:
            layout.adopt()
            self._layout = layout
        layout.begin()
        self._steps += 1
        return layout

    def _new_layout(self, loss: Tensor, threshold: int) -> Layout:
        order = autograd.gradient_order(loss)
        check_same_model(self.communicator, order)
        if not self._drifted:
            check_same_values(self.communicator, [p for p in order if id(p) not in self._attached])
        layout = Layout(order, threshold, self.communicator, check_finite=self.non_finite != "ignore")
        layout.set_states(self._unclaimed.pop(threshold, {}))
        return layout

    def _update(self, layout: Layout) -> None:
        for bucket in layout.buckets:
            for param, grad in bucket.pairs():
                self.opt.update(param, grad)
        self.opt.step()

    # -- NaN and infinity --------------------------------------------------------------------------------------------
    def _wait(self, bucket: Bucket, reduction: Reduction) -> GradientError | None:
        """Finish a reduction; what was wrong with the gradients, if anything was."""
        try:
            reduction.wait()
        except GradientError as error:
            return self._named(bucket, error)
        return None

    def _compare(self, layout: Layout) -> GradientError | None:
        """Ask all ranks about gradients that stay with them; all come to the same answer."""
        found = ((i, bucket.first_nonfinite()) for i, bucket in enumerate(layout.buckets))
        own = next(((i, element) for i, element in found if element is not None), (-1, -1))
        everyone = np.empty(2 * self.world_size, np.int64)
        self.communicator.all_gather(np.array(own, np.int64), everyone, label="non-finite").wait()
        for rank, (index, element) in enumerate(everyone.reshape(-1, 2).tolist()):
            if index >= 0:
                return self._named(layout.buckets[index], GradientError("", rank=rank, index=element))
        return None

    def _named(self, bucket: Bucket, error: GradientError) -> GradientError:
        if error.rank is None or error.index is None:
            return error
        named = GradientError(
            f"step {self._steps - 1}: the gradient of {bucket.name_of(error.index)} is NaN, infinite or too large for "
            f"a sum on rank {error.rank} ({self.communicator.topology.hosts[error.rank]}); lower the learning rate, "
            "clip the gradients, or leave such steps out with DistOpt(non_finite='skip')",
            rank=error.rank,
            index=error.index,
        )
        named.__cause__ = error
        return named

    def _judge(self, error: GradientError | None) -> bool:
        """Whether the gradients of this step may be applied; the same on all ranks."""
        if error is None:
            return True
        if self._layout is not None:
            self._layout.buckets[0].params[0].device.check()  # a wrong label tells more than the NaN that comes of it
        if self.non_finite != "skip":
            raise error
        self._skipped += 1
        log.warning("update skipped, step %d of %d skipped so far: %s", self._skipped, self._steps, error)
        return False

    # -- statistics --------------------------------------------------------------------------------------------------
    def stats(self) -> CommunicationStatistics:
        """Local. What communication has cost since the first step; the difference of two is what lies between them."""
        costs: dict[tuple[str, str], compress.Statistics] = {}
        for layout in self._layouts.values():
            for bucket in layout.buckets:
                for kind, cost in bucket.statistics.items():
                    total = costs.setdefault((bucket.label, kind), compress.Statistics())
                    total += cost
        return CommunicationStatistics(self._steps, self._skipped, costs)

    # -- states ------------------------------------------------------------------------------------------------------
    def get_states(self) -> dict[str, np.ndarray[Any, Any]]:
        """Local. Copies of all that a later run needs to go on, this rank's residuals included.

        Residuals differ between ranks: every rank saves its own.
        """
        states = {f"optimizer/{name}": array for name, array in self.opt.get_states().items()}
        flags = (self._drifted, self._own_slots)
        states["steps"] = np.array([self._steps, self._skipped, self._partition, *flags], np.int64)
        existing = {threshold: layout.get_states() for threshold, layout in self._layouts.items()}
        for threshold, buckets in (self._unclaimed | existing).items():
            for index, kinds in buckets.items():
                for kind, arrays in kinds.items():
                    states.update({f"{threshold}/{index}/{kind}/{name}": array for name, array in arrays.items()})
        return states

    def set_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Local. Go on from what `get_states` gave on the same rank of a job of the same size.

        Raises:
            StateError: the states are not of a DistOpt, or do not fit; nothing was changed.
        """
        counts = states.get("steps", np.empty(0))
        loaded: dict[int, LayoutStates] = {}
        for key, array in states.items():
            if key != "steps" and not key.startswith("optimizer/"):
                threshold, index, kind, name = _split(key)
                loaded.setdefault(threshold, {}).setdefault(index, {}).setdefault(kind, {})[name] = array
        if counts.shape != (5,):
            raise StateError("these are no states of a DistOpt: steps is missing")
        for threshold, layout in self._layouts.items():
            layout.check_states(loaded.get(threshold, {}))
        optimizer = {k.removeprefix("optimizer/"): array for k, array in states.items() if k.startswith("optimizer/")}
        self.opt.set_states(optimizer)
        for threshold, layout in self._layouts.items():
            layout.set_states(loaded.pop(threshold, {}))
        self._unclaimed = loaded
        self._steps, self._skipped, self._partition = map(int, counts[:3])
        self._drifted, self._own_slots = map(bool, counts[3:])


def _split(key: str) -> tuple[int, int, str, str]:
    """Threshold, bucket, kind of codec and name of a state that belongs to a reducer."""
    parts = key.split("/")
    if len(parts) != 4 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        raise StateError(f"{key} is no state of a DistOpt; pass what DistOpt.get_states gave")
    return int(parts[0]), int(parts[1]), parts[2], parts[3]
