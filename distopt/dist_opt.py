"""DistOpt: where the numerics meet the engine.

The way of a gradient: `autograd.backward` writes it into its bucket and yields it (`_step`, the one loop over
gradients); the engine (`distopt.engine`) encodes and sends the bucket when it is full, and leaves the mean over ranks
where the gradient was; the wrapped optimizer applies it (`_update`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, partial
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from . import codecs, comm, launch
from .checks import absent_name, check_assignment, names_of
from .codecs import BadGradient, Codec, CommunicationStatistics
from .codecs.kept_arrays import States
from .comm import Communicator
from .comm.base import Array
from .comm.gpu import driver_version
from .comm.world import current, offer
from .engine.by_hand import Fusion
from .engine.engine import DEFAULT_BUCKET_ELEMENTS, DEFAULT_CHECK_EVERY, Engine, NonFinite
from .engine.layout import Layout, under
from .engine.shards import RunningStatistics, Shards
from .engine.step import GradientCounter
from .errors import UsageError
from .launch import Job, Ticket
from .nn.core import autograd
from .nn.core.mode import mode
from .nn.core.tensor import Tensor
from .nn.devices.device import Device, get_default_device
from .nn.devices.discovery import gpu_or_cpu
from .nn.optim.accumulation import GradientAccumulation
from .nn.optim.hyperparameters import Hyperparameter
from .nn.optim.optimizer import Optimizer
from .nn.optim.rules import SGD
from .nn.optim.views import CurrentValue
from .recorder.timeline import timeline
from .settings import Settings


class DistOpt:
    """An optimizer whose gradients are averaged over the ranks of a job.

    Without `nccl_id` it is the MPI constructor: rank and size come from the launcher, or from `distopt.init`. With
    `nccl_id`, a `distopt.singa_wrap.NcclIdHolder` that the parent made, it is the multiprocess constructor.

    Attributes of the wrapped optimizer, such as `lr` and `grad_norm`, can be read and assigned here, too. Assign the
    same on all ranks.

    Args:
        opt: the optimizer to wrap, which applies the averaged gradients (default: `SGD()`).
        nccl_id: the job's ticket, for processes of one machine.
        local_rank: number of this process (with `nccl_id`).
        world_size: number of processes (with `nccl_id`).
        buffSize: elements of one message of `fused_all_reduce`; more are sent as several.
        job: this rank's membership (default: found from the launcher, see `distopt.launch.join`).
        communicator: how bytes move (default: that of the world which `distopt.init` has made, if neither is given,
            else the best one for the job, see `distopt.comm.create`).
        codec: how gradients are encoded: a codec, or the name of one (see `distopt.codecs`).
        bucket_elements: bucket size in elements, see `distopt.engine.layout.plan`.
        partition_elements: size in elements of the partitions of a partial update (default: `bucket_elements`).
        non_finite: what to do about a gradient that is NaN or infinite on any rank. "raise" a GradientError on all
            ranks; "skip" the update of this step on all ranks, with a warning; "ignore" it: fp32 then does not look,
            and the other codecs, which cannot carry such a value, raise.
        clip_grad_norm: limit the l2 norm of the averaged gradient of each step, see `Optimizer.clip_gradients`;
            None keeps the value set on `opt`. All ranks have the same mean and so the same norm. With a sparse codec it
            covers the elements that were sent, not residuals; in a partial update it is this rank's own.
        check_every: compare the parameters of all ranks, bit by bit, before the first step and then every
            `check_every` steps, and raise a MismatchError on all ranks if one differs; 0: never. Partial updates let
            parameters differ, and have no such check.
        shards: cut each step into so many shards, whatever the number of ranks: parameters, running statistics and
            states then have the same bits for any number of ranks, see `shards`. At least the number of ranks; on CPUs.
        seed: of the random numbers in shards, such as those of dropout.

    Attributes:
        world_size: number of ranks in the job.
        global_rank: number of this process in the job.
        local_rank: number of this process on its host.
        communicator: the communicator in use.
        opt: the wrapped optimizer.
        bucket_elements: see above.
        partition_elements: see above.
    """

    opt: Optimizer
    communicator: Communicator
    world_size: int
    global_rank: int
    local_rank: int
    bucket_elements: int
    partition_elements: int

    def __init__(
        self,
        opt: Optimizer | None = None,
        nccl_id: Ticket | None = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        buffSize: int = 4194304,
        *,
        job: Job | None = None,
        communicator: Communicator | None = None,
        codec: Codec | str = "fp32",
        bucket_elements: int = DEFAULT_BUCKET_ELEMENTS,
        partition_elements: int | None = None,
        non_finite: NonFinite = "raise",
        clip_grad_norm: float | None = None,
        check_every: int = DEFAULT_CHECK_EVERY,
        shards: int | None = None,
        seed: int = 0,
    ) -> None:
        """Collective."""
        opt = SGD() if opt is None else opt
        if not isinstance(opt, Optimizer):
            raise UsageError(f"DistOpt wraps an optimizer, such as opt.SGD(lr=0.1); got {opt!r}")
        if not isinstance(communicator, Communicator | None):
            raise UsageError(
                f"DistOpt takes a communicator of distopt, such as World(MpiJob(comm)).communicator for an mpi4py "
                f"communicator; got {communicator!r}"
            )
        self.codec = codec
        Engine.check_options(non_finite, check_every)
        if clip_grad_norm is not None:
            opt.clip_grad_norm = clip_grad_norm
        asked = nccl_id, local_rank, world_size
        if asked != (None, None, None) and communicator is None and job is None:
            job = launch.join(*asked)
        if communicator is None:
            world = current() if job is None else None
            communicator = comm.create(job or launch.join()) if world is None else world.communicator
            offer(communicator)
        self.opt = opt
        self.communicator = communicator
        self.world_size = communicator.topology.world_size
        self.global_rank = communicator.topology.rank
        self.local_rank = communicator.topology.local_rank
        self.bucket_elements = bucket_elements
        self.partition_elements = bucket_elements if partition_elements is None else partition_elements
        of_steps = None if shards is None else Shards(shards, seed, communicator.topology)
        self._engine = Engine(communicator, non_finite, check_every, of_steps)
        self._layout: Layout | None = None  # of the buckets that autograd writes into
        self._pairs: list[tuple[Tensor, Tensor]] = []  # its parameters, each with its view of a bucket, as a tensor
        self._accumulation = GradientAccumulation()
        self._before_backward: Callable[[], object] | None = None  # see `watch`
        self._before_update: Callable[[], object] | None = None
        self._fusion = Fusion(communicator, buffSize, self._engine.agreement.label)

    def __call__(self, loss: Tensor) -> None:
        """Collective. One training step from `loss`: backward, average, update."""
        self.reduce_and_update(loss, self.codec, self.bucket_elements)

    def attach(self, params: Iterable[Tensor]) -> None:
        """Collective. Check that all ranks train the same model, and give all of them the parameters of rank 0.

        `Model` calls it as soon as it has both parameters and optimizer. A script without `Model` calls it before its
        first forward pass, or starts every rank from equal parameters.

        Raises:
            MismatchError: names, shapes or types differ; the message names the ranks and the first difference.
        """
        self._engine.agreement.attach(list(params))

    if TYPE_CHECKING:  # of every wrapped optimizer; others, such as `momentum`, are read as `opt.momentum`
        lr = Hyperparameter()
        lr_value = CurrentValue("lr")
        clip_grad_norm: float | None
        grad_norm: float | None
        step_counter: Tensor
        values: dict[str, float]
    else:  # with them, type checkers accept every name

        def __getattr__(self, name: str) -> Any:
            opt = vars(self).get("opt")
            if _has(opt, name):
                return getattr(opt, name)
            kind, reasons = type(self), {}
            if hasattr(opt, name):
                reasons[name] = f"it is a method of the wrapped optimizer, of this rank alone; call opt.{name}"
            raise absent_name(kind.__name__, name, names_of(kind), reasons)

        def __setattr__(self, name: str, value: Any) -> None:
            opt = vars(self).get("opt")
            if name not in vars(self) and name in names_of(type(opt)) - names_of(type(self)) and _has(opt, name):
                setattr(opt, name, value)
            else:
                check_assignment(self, name, opt)
                object.__setattr__(self, name, value)

    @property
    def codec(self) -> Codec:
        """Local. The codec of `opt(loss)`. Another, or its name, may be assigned between two steps, on all ranks."""
        return self._codec

    @codec.setter
    def codec(self, value: Codec | str) -> None:
        self._codec = codecs.codec_of(value)

    @cached_property
    def device(self) -> Device:
        """Local. Where to put the model: the GPU that the communicator has taken for this rank, else the CPU.

        A job of one rank takes the first GPU that can be used. `DISTOPT_DEVICE` decides otherwise, at the first look.

        Raises:
            MissingDependencyError: DISTOPT_DEVICE=cuda and no GPU can be used.
            UsageError: DISTOPT_DEVICE=cuda and a communicator between processes of the CPU.
        """
        index: int | None = getattr(self.communicator, "device_id", 0 if self.world_size == 1 else None)
        if index is not None:
            return gpu_or_cpu(index, log=driver_version() > 0)
        if Settings.from_env().device == "cuda":
            raise UsageError(
                f"DISTOPT_DEVICE=cuda, but the {self.communicator.name} communicator moves data of the CPU; set "
                "DISTOPT_TRANSPORT=nccl too"
            )
        return get_default_device()

    @property
    def non_finite(self) -> NonFinite:
        """Local. See the constructor. All ranks may change it between steps, to or from "ignore" before the first."""
        return self._engine.non_finite

    @non_finite.setter
    def non_finite(self, value: NonFinite) -> None:
        Engine.check_options(value)
        self._engine.non_finite = value

    def reduce(self, array: Array) -> None:
        """Collective. Replace a contiguous array, in place, by its sum over all ranks, as `SyncBatchNorm2d` does.

        Raises:
            UsageError: inside `join`, where a rank without data would not call it; or with shards.
        """
        if self._engine.is_joining:
            raise UsageError("statistics of all ranks need all of them; use BatchNorm2d inside DistOpt.join")
        self._engine.check_unsharded("SyncBatchNorm2d, or another sum over ranks,")
        if self.world_size > 1:
            self.communicator.all_reduce(array, label="reduce").wait()

    # -- steps -------------------------------------------------------------------------------------------------------
    def reduce_and_update(
        self,
        loss: Tensor,
        codec: Codec,
        bucket_elements: int = DEFAULT_BUCKET_ELEMENTS,
        clip: float | None = None,
    ) -> None:
        """Collective. Average the gradients of `loss` over the ranks, then update the parameters.

        Args:
            loss: the loss to differentiate.
            codec: how gradients are encoded. Options and kind may change between steps, equally on all ranks: a kind of
                codec that is used again resumes from the residuals that it has left.
            bucket_elements: bucket size in elements.
            clip: limit every element of a gradient to [-clip, clip] before it is sent.

        On a GPU the host does not wait for the check of the gradients: the device leaves the update out if they are
        bad, and the next step or `get_states` raises the error or logs the skipped update.

        Raises:
            GradientError: see `non_finite`; on all ranks, and no parameter has been changed.
            UsageError: the parameters under `loss` are not those of the first step, or `clip` is not positive.
        """
        self._step(loss, partial(self._engine.begin, codec, bucket_elements, clip=clip, defers=self.opt.can_gate))

    def update_partially(self, loss: Tensor, partition_elements: int = DEFAULT_BUCKET_ELEMENTS) -> None:
        """Collective. Update the parameters by this rank's own gradients, then average one partition of them.

        Successive steps visit the partitions in a cycle. In between the ranks' parameters differ: call `synchronize`
        before evaluating or saving.

        Args:
            loss: the loss to differentiate.
            partition_elements: partition size in elements.

        Raises:
            GradientError: see `non_finite`; on all ranks, and no parameter has been changed.
            UsageError: the parameters under `loss` are not those of the first step.
        """
        if layout := self._step(loss, partial(self._engine.begin_partial, partition_elements)):
            self._engine.partial.average(layout)

    def no_sync(self) -> AbstractContextManager[None]:
        """Local. In the body of a `with`, a step only adds the gradients of its loss to earlier ones; nothing is sent.

        The next step outside, of any kind, adds them to its own and then continues as usual: the sum is clipped, sent
        and averaged over the ranks. For the gradient of the mean over n such batches, divide each loss by n. Every
        rank leaves the body before the same step; the number of losses may differ between ranks. A step whose update is
        skipped takes the sum with it. The name is PyTorch's.

        Raises:
            UsageError: with shards, which are added up anyway.
        """
        self._engine.check_unsharded("no_sync, which adds up losses in their order,")
        return self._accumulation.collecting()

    def shards(self, *batch: Any) -> Iterator[Any]:
        """Collective with the steps in it. The parts of this rank's batch, one for each of its shards of a step.

            for indices in sampler:  # ShardedSampler(..., shards=8)
                for part in dist_opt.shards(indices):
                    model(tensor.from_numpy(x[part]), tensor.from_numpy(y[part]))

        Each turn calls the optimizer with one loss, the mean over its part; the last turn on each rank averages the
        gradients of all shards and updates. In a turn, `device.rng` begins with seed, step and shard, whatever was
        drawn before; afterwards it is as it was before the loop. Layers of a `Model` take the batches into their
        running statistics at the end of the step.

        Args:
            batch: arrays or lists, cut along their first axis into equal parts; of one, the parts come alone, of
                several as tuples.

        Raises:
            UsageError: the optimizer has no shards, the batch cannot be cut equally, or a turn has not called the
                optimizer once.
        """
        shards = self._engine.shards
        if shards is None:
            raise UsageError("shards() cuts steps for DistOpt(..., shards=8), and this one has no shards")
        return shards.walk(batch, self._engine.statistics, get_default_device().seeded)

    @property
    def add_statistics(self) -> Callable[..., RunningStatistics] | None:
        """Local. For layers with running statistics: takes them into steps in shards; None without shards."""
        shards = self._engine.shards
        if shards is None:
            return None
        return lambda owner, arrays, momentum: shards.add_statistics(owner, RunningStatistics(arrays, momentum))

    def synchronize(self) -> None:
        """Collective. Make the parameters of all ranks equal to their mean, where partial updates let them differ.

        Call it before evaluating or saving; otherwise it does nothing.
        """
        self._engine.partial.synchronize()

    def join(self) -> AbstractContextManager[None]:
        """Collective. Let ranks take different numbers of steps in the body of a `with`.

        A rank that leaves the body waits in it until all have left. Meanwhile it contributes gradients of zero to the
        steps of the others and applies the same updates, so that the ranks end with equal parameters. A step averages
        over the ranks that still have data. Every rank needs at least one batch; and all take the same kind of step,
        by any codec without error feedback. Other collectives must stay outside of the body.

        It costs one exchange of 16 bytes per rank and step. An exception in the body of one rank does not end its data:
        it leaves at once, and the others get an error as soon as the rank closes or ends.

        Raises:
            UsageError: a rank has no batch, or a step is of a kind that needs all ranks.
            MismatchError: the ranks took different kinds of steps.
        """
        return self._engine.join(self.opt, self._update)

    def _step(self, loss: Tensor, begin: Callable[..., GradientCounter]) -> Layout | None:
        """Run backward, hand each gradient to the engine as soon as it is final, and update; None if nothing was."""
        if self._accumulation.active:
            # With the pauses of a step, so that a graph that is captured here serves for it, too.
            self._accumulation.add(autograd.backward(loss, pauses=self._layout.last if self._layout else ()))
            return None
        if self._before_backward is not None:
            self._before_backward()
        if timeline.is_on:
            timeline.phase("backward")
        shards = self._engine.shards
        step = begin(order=partial(autograd.gradient_order, loss), rule=self.opt, version=mode.freezes)
        layout = step.layout
        if layout is not self._layout:
            self._adopt(layout)
        more_shards = shards is not None and shards.precedes_last
        for param, grad in self._pairs:  # in every step: scripts may have assigned None, as they do for PyTorch
            param.grad = None if more_shards else grad  # the sum over shards keeps the arrays that it is given
        with step:
            pairs: Iterable[tuple[Tensor, Tensor]] = autograd.backward(loss, pauses=layout.last)
            if self._accumulation.sums:
                pairs = self._accumulation.taken(pairs)
            if shards is not None and more_shards:
                shards.fold(step, {id(param): grad.array for param, grad in pairs})
                return None
            for param, _ in pairs:
                step.final(param)
            if timeline.is_on:
                timeline.phase("")
            verdict = step.finish_deferred()
        if self._engine.unsettled is not None:
            self._engine.settle(following=step)
        if isinstance(verdict, BadGradient):
            loss.device.check()  # a wrong label is a better error than the NaN it causes
            self._engine.refuse(verdict)
            return None
        if verdict is None:
            self._update(layout)
            return layout
        with self.opt.gated(verdict.flag) as undo:
            self._update(layout)
        self._engine.postpone(step, undo, loss.device.check)
        return layout

    def _adopt(self, layout: Layout) -> None:
        """Let autograd write into the views of other buckets."""
        for param, _ in self._pairs:
            param.grad = None  # if it has been frozen, its old bucket can be freed
        self._layout = layout
        self._pairs = [
            (param, Tensor.of(grad, param.device, requires_grad=False))
            for bucket in layout.buckets
            for param, grad in zip(cast("tuple[Tensor, ...]", bucket.params), bucket.grads, strict=True)
        ]

    def _update(self, layout: Layout) -> None:
        if self._before_update is not None:
            self._before_update()
        if timeline.is_on:
            timeline.phase("update")
        if self.opt.clip_grad_norm is not None:
            # Buckets depend on the transport, so a norm that must not takes the parameters one by one.
            by_parameter = self._engine.shards is not None
            grads = [grad.array.reshape(-1) for _, grad in self._pairs] if by_parameter else None
            self.opt.clip_gradients(grads or [bucket.flat for bucket in layout.buckets])
        self.opt.update_all(self._pairs)
        self.opt.step()
        if timeline.is_on:
            timeline.phase("")

    # -- statistics and states ---------------------------------------------------------------------------------------
    def stats(self) -> CommunicationStatistics:
        """Local. The cost of communication since the first step; subtract an earlier result for the cost since then."""
        return self._engine.stats()

    def get_states(self) -> States:
        """Local. Copies of all that a later run needs to resume, including this rank's residuals.

        Residuals differ between ranks: every rank saves its own. On a GPU it is collective if the gradients of the last
        step were bad.

        Raises:
            GradientError: they were; see `reduce_and_update`.
            UsageError: gradients of `no_sync` wait for an update.
        """
        self._accumulation.check_empty()
        others = self._engine.get_states()  # first: it may find that the last update has not been made
        return {f"optimizer/{name}": array for name, array in self.opt.get_states().items()} | others

    def set_states(self, states: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> None:
        """Local. Resume from the result of `get_states` on the same rank of a job of the same size.

        Tensors, which `Model.load_states` returns, are accepted, too. Gradients of `no_sync` are dropped.

        Raises:
            StateError: the states are not of a DistOpt, or do not fit; nothing was changed.
        """
        slots, others = _divided(states)
        self._engine.check_states(others)
        self.opt.set_states(slots)
        self._engine.set_states(others)
        self._accumulation.sums.clear()

    def check_states(self, states: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> None:
        """Local. Whether `set_states` would accept them.

        Raises:
            StateError: see `set_states`.
        """
        slots, others = _divided(states)
        self._engine.check_states(others)
        self.opt.check_states(slots)

    def shared_states(self, names: Iterable[str]) -> set[str]:
        """Local. Which of these states are the same on all ranks, so that a checkpoint saves them once."""
        equal = not self._engine.partial.slots_pending
        all_equal = self._engine.shards is not None
        return {name for name in names if equal and (all_equal or name.startswith("optimizer/"))}

    def unshared_states(self) -> States:
        """Local. The states that may differ between ranks, or change elsewhere than in an update."""
        return self.get_states() if self._engine.partial.slots_pending else self._engine.get_states()

    @property
    def is_in_shards(self) -> bool:
        """Local. Whether steps are cut into shards, so that no state depends on the rank."""
        return self._engine.shards is not None

    def watch(self, before_backward: Callable[[], object], before_update: Callable[[], object]) -> None:
        """Local. From now on, call these functions in each step, as a Checkpoint does under `distopt run --heal`.

        Args:
            before_backward: when the forward pass has ended.
            before_update: before parameters or states of the optimizer change.
        """
        self._before_backward, self._before_update = before_backward, before_update

    @property
    def states_are_copies(self) -> bool:
        """Local. Whether the result of `get_states` never changes again. A user's optimizer may return views."""
        return type(self.opt).get_states is Optimizer.get_states

    @property
    def parameters_agree(self) -> bool:
        """Local. Whether all ranks have the same parameters; between partial updates they do not."""
        return not self._engine.partial.pending


def _has(opt: Optimizer | None, name: str) -> bool:
    """Whether the wrapped optimizer has a public attribute of that name that is not a method."""
    return not name.startswith("_") and hasattr(opt, name) and not isinstance(getattr(opt, name), MethodType)


def _divided(states: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> tuple[States, States]:
    """The optimizer's states and the engine's states, as arrays."""
    arrays = {key: value.to_numpy() if isinstance(value, Tensor) else value for key, value in states.items()}
    others = {key: array for key, array in arrays.items() if not key.startswith("optimizer/")}
    return under("optimizer", arrays), others
