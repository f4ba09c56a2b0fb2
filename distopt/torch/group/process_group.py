"""The process group of `torch.distributed` over a communicator.

PyTorch calls its methods from Python and, for DDP and functional collectives, from C++. Any thread may call them: the
operations run one at a time, in the order of the calls; see `queue`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...comm.native import NativeCommunicator
from ...errors import DistoptError
from ...recorder.timeline import timeline
from ..ddp.shared_buckets import LEAST_BYTES
from ..errors import as_torch
from ..private import NamedGroup, current_autograd_node, give_backend, is_profiling, register_work, untraced
from ..tensors import memory_of, reduction_of, refuse_nan
from .arguments import check_any, check_count, check_list, check_timeout, check_whole, seconds_of, split_rows
from .channels import Channel, Channels
from .collectives import STARTS, Collectives, of_each
from .futures import callback_owner
from .messages import Mail
from .monitored_barrier import monitored_barrier
from .queue import PendingWork
from .work import CompletedWork

if TYPE_CHECKING:
    from torch import Tensor

    from ...comm.base import Communicator

_log = logging.getLogger("distopt")

# A destroyed group drops operations that are not complete after this time, and leaves threads that run for longer.
_LEAVE_SECONDS = 2.0
_DEFAULTS = dist.AllreduceOptions()  # options of other collectives have the same defaults
_groups: weakref.WeakSet[DistoptProcessGroup] = weakref.WeakSet()  # all groups of this process


@untraced
class DistoptProcessGroup(NamedGroup):
    """A process group for CPU tensors. `init_process_group("distopt")` and `new_group` make it.

    Args:
        store: PyTorch's store for the ranks of this group.
        rank: of this process in the group.
        size: number of ranks.
        name: equal on all ranks, and different from the names of other groups.
        communicator: of the operations that the script calls.
        connect: makes another communicator of all ranks, by a name that is equal on all; collective.
        make: makes a group of some ranks by store, own rank, numbers of the ranks in the job, name and timeout.
        timeout: how long an operation waits for a rank.
        who: how error messages name the ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        name: str,
        communicator: Communicator,
        connect: Callable[[str], Communicator],
        make: Callable[[dist.Store, int, Sequence[int], str, timedelta], DistoptProcessGroup],
        timeout: timedelta,
        who: Sequence[str],
    ) -> None:
        super().__init__(rank, size)
        self._store = store
        self.seconds = check_timeout(timeout)
        self._make = make
        self._channels = Channels(Channel(name, communicator, who, self.seconds), connect)
        self._mail = Mail(communicator)
        self._who = who
        self._barriers = 0
        self._has_left = False
        self._check_nan = os.environ.get("TORCH_DIST_NAN_CHECK", "0") == "1"
        self._reduce = None
        if isinstance(communicator, NativeCommunicator) and not self._check_nan:
            self._reduce = communicator.reduce_memory
        # Larger storages may move into shared memory.
        self._reduce_below_bytes = LEAST_BYTES if communicator.reduces_in_place else sys.maxsize
        self._backend = give_backend(self)
        if not _groups:
            atexit.register(_leave_at_exit)
        _groups.add(self)

    def __repr__(self) -> str:
        transport = self._channels.first.communicator.name
        return f"<{type(self).__name__}: rank {self.rank()} of {self.size()} over {transport}>"

    # -- reductions --------------------------------------------------------------------------------------------------
    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Collective. Replace the one tensor in `tensors` by its reduction over all ranks.

        Like every operation here, it returns at once with `opts.asyncOp`, and else waits; errors of other ranks are
        raised, as `DistBackendError`, by this call or by `wait` of the result.
        """
        opts = _DEFAULTS if opts is None else opts
        (tensor,) = tensors = _list(tensors)
        if self._reduce is not None and not opts.asyncOp and self._reduce_at_once(tensor, opts):
            return CompletedWork(tensors)
        action = Collectives.all_reduce
        return self._run(opts, tensors, action, tensor, reduction_of(opts.reduceOp, tensor))

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> dist.Work:
        """Collective. Replace each of `tensors`, which share a dtype, by its reduction over all ranks."""
        check_any("all_reduce_coalesced", tensors)
        reduction = reduction_of(opts.reduceOp, tensors[0])
        return self._run(opts, tensors, of_each(Collectives.all_reduce), [tensors], reduction)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Collective. As `allreduce`, but only the tensor of rank `opts.rootRank` changes."""
        (tensor,) = tensors = _list(tensors)
        reduction = reduction_of(opts.reduceOp, tensor)
        return self._run(opts, tensors, Collectives.reduce, tensor, reduction, opts.rootRank)

    def reduce_scatter(self, outs: Any, parts: Any, opts: Any) -> dist.Work:
        """Collective. Write part r of the reduction to the one tensor in `outs` of rank r.

        Args:
            outs: a list of one tensor.
            parts: a list of one list, with a tensor for each rank; sizes may differ between ranks.
            opts: of PyTorch.

        Raises:
            ValueError: number, sizes or dtypes of the tensors do not fit.
        """
        (out,), (lists,) = _list(outs), parts
        check_list(self.size(), "reduce_scatter", lists, "input")
        check_count("reduce_scatter", out, lists[self.rank()])
        action = Collectives.reduce_scatter_list
        return self._run(opts, [out], action, out, lists, reduction_of(opts.reduceOp, out))

    def reduce_scatter_single(self, out: Tensor, tensor: Tensor, opts: Any) -> dist.Work:
        """Collective. As `reduce_scatter`, with the equal parts of all ranks in `tensor`, one after the other.

        Raises:
            ValueError: `tensor` is not as long as the `out` of all ranks together, or of another dtype.
        """
        check_whole(self.size(), "reduce_scatter_single", out, tensor)
        reduction = reduction_of(opts.reduceOp, out)
        return self._run(opts, [out], Collectives.reduce_scatter, out, tensor, reduction)

    def reduce_scatter_single_coalesced(self, outs: Any, tensors: Any, opts: Any) -> dist.Work:
        """Collective. `reduce_scatter_single` for each pair of `outs` and `tensors`."""
        check_any("reduce_scatter_single_coalesced", tensors)
        for out, tensor in zip(outs, tensors, strict=True):
            check_whole(self.size(), "reduce_scatter_single", out, tensor)
        reduction = reduction_of(opts.reduceOp, outs[0])
        return self._run(opts, outs, of_each(Collectives.reduce_scatter), [outs, tensors], reduction)

    # -- moves -------------------------------------------------------------------------------------------------------
    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        """Collective. Overwrite the one tensor in `tensors` by that of rank `opts.rootRank`."""
        (tensor,) = tensors = _list(tensors)
        return self._run(opts, tensors, Collectives.broadcast, tensor, opts.rootRank)

    def allgather(self, outs: Any, tensors: Any, opts: Any = None) -> dist.Work:
        """Collective. Write the tensor of rank r to `outs[0][r]`.

        Args:
            outs: a list of one list, with a tensor for each rank; sizes may differ between ranks.
            tensors: a list of one tensor.
            opts: of PyTorch.

        Raises:
            ValueError: number, sizes or dtypes of the tensors do not fit.
        """
        (tensor,), (each,) = _list(tensors), outs
        check_list(self.size(), "all_gather", each, "output", tensor)
        check_count("all_gather", tensor, each[self.rank()])
        return self._run(opts, each, Collectives.all_gather_list, each, tensor)

    def allgather_coalesced(self, outs: Any, tensors: Any, opts: Any = None) -> dist.Work:
        """Collective. Write tensor i of rank r to `outs[r][i]`."""
        # PyTorch passes one list for each rank, with one tensor for each tensor of that rank.
        check_any("all_gather_coalesced", tensors)
        lists = [list(each) for each in zip(*outs, strict=True)]
        flat = [out for each in outs for out in each]
        return self._run(opts, flat, of_each(Collectives.all_gather_list), [lists, tensors])

    def all_gather_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Collective. Write the tensors of all ranks to `out`, one after the other.

        Raises:
            ValueError: `out` is not as long as the tensors of all ranks together, or of another dtype.
        """
        check_whole(self.size(), "all_gather_single", tensor, out)
        return self._run(opts, [out], Collectives.all_gather, out, tensor)

    def all_gather_single_coalesced(self, outs: Any, tensors: Any, opts: Any = None) -> dist.Work:
        """Collective. `all_gather_single` for each pair of `outs` and `tensors`."""
        check_any("all_gather_single_coalesced", tensors)
        for out, tensor in zip(outs, tensors, strict=True):
            check_whole(self.size(), "all_gather_single", tensor, out)
        return self._run(opts, outs, of_each(Collectives.all_gather), [outs, tensors])

    def gather(self, outs: Any, tensors: Any, opts: Any) -> dist.Work:
        """Collective. Write the tensor of rank r to `outs[0][r]` of rank `opts.rootRank`; `outs` is else empty."""
        (tensor,), each = _list(tensors), outs[0] if outs else []
        if self.rank() == opts.rootRank:
            check_list(self.size(), "gather", each, "output", tensor)
            check_count("gather", tensor, *each)
        return self._run(opts, each, Collectives.gather, each, tensor, opts.rootRank)

    def scatter(self, outs: Any, tensors: Any, opts: Any) -> dist.Work:
        """Collective. Write `tensors[0][r]` of rank `opts.rootRank` to `outs[0]` of rank r; others give none."""
        (out,), each = _list(outs), tensors[0] if tensors else []
        if self.rank() == opts.rootRank:
            check_list(self.size(), "scatter", each, "input", out)
            check_count("scatter", out, *each)
        return self._run(opts, [out], Collectives.scatter, out, each, opts.rootRank)

    def alltoall(self, outs: Any, parts: Any, opts: Any = None) -> dist.Work:
        """Collective. Send `parts[r]` to rank r, and receive into `outs[r]` from rank r; sizes may differ."""
        for each, role in ((outs, "output"), (parts, "input")):
            check_list(self.size(), "all_to_all", each, role)
        return self._run(opts, outs, Collectives.all_to_all, outs, parts)

    def all_to_all_single(
        self, out: Tensor, tensor: Tensor, out_splits: Sequence[int], splits: Sequence[int], opts: Any = None
    ) -> dist.Work:
        """Collective. Send rows of `tensor` to each rank, and receive rows of `out` from each.

        Args:
            out: rows from rank 0, then from rank 1, and so on.
            tensor: rows for rank 0, then for rank 1, and so on.
            out_splits: number of rows from each rank; empty: equal numbers.
            splits: number of rows for each rank; empty: equal numbers.
            opts: of PyTorch.

        Raises:
            ValueError: the numbers do not add up to the rows of their tensor, or cannot be equal.
        """
        outs = split_rows(self.size(), out, out_splits, "output")
        parts = split_rows(self.size(), tensor, splits, "input")
        return self._run(opts, [out], Collectives.all_to_all, outs, parts)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Collective. Complete when every rank has called it."""
        return self._run(opts, [], Collectives.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Collective. A barrier through the store. Rank 0 waits for `timeout` (default: the timeout of the group).

        Raises:
            DistBackendError: a rank is absent. On rank 0 it names all absent ranks with `wait_all_ranks`, else the
                first.
        """
        self._barriers += 1
        store = dist.PrefixStore(f"monitored_barrier/{self._barriers}", self._store)
        seconds = self.seconds if timeout is None else seconds_of(timeout)
        monitored_barrier(store, self.rank(), self._who, seconds, name_all=wait_all_ranks)

    # -- messages ----------------------------------------------------------------------------------------------------
    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        """Send the one tensor in `tensors` to rank `dst`, which calls `recv` with the same tag."""
        (tensor,) = _list(tensors)
        return self._message(self._mail.send, tensor, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        """Receive the one tensor in `tensors` from rank `src`, which calls `send` with the same tag."""
        (tensor,) = _list(tensors)
        return self._message(self._mail.receive, tensor, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receive the one tensor in `tensors` from the rank that first calls `send` with the same tag."""
        (tensor,) = _list(tensors)
        return self._message(self._mail.receive, tensor, None, tag)

    def _message(self, start: Callable[..., dist.Work], tensor: Tensor, *args: Any) -> dist.Work:
        if self._check_nan and start == self._mail.send:
            refuse_nan((), (tensor,), self.rank())
        if is_profiling():
            start = _recorded(start, start)
        try:
            work = start(tensor, *args, self.seconds)
        except DistoptError as error:
            raise as_torch(error) from error
        register_work(work, (tensor,))
        return work

    # -- names that PyTorch had before ---------------------------------------------------------------------------------
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- life cycle --------------------------------------------------------------------------------------------------
    def get_group_store(self) -> dist.Store:
        """Local. The store of the group's ranks."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Local. Set how long operations that are called from now on wait for a rank."""
        self.seconds = check_timeout(timeout)

    @property
    def count(self) -> int:
        """Local. The collectives that the script has called, the same on all ranks."""
        return self._channels.first.count

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Local. Do nothing: the ranks are connected."""

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> DistoptProcessGroup | None:
        """Collective among `ranks` of this group. Make their group; None on the other ranks."""
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{list(ranks)}"
        store = dist.PrefixStore(f"{name}/", self._store)
        global_ranks = [dist.get_global_rank(self, rank) for rank in ranks]
        timeout = timedelta(seconds=self.seconds) if timeout is None else timeout
        group = self._make(store, list(ranks).index(self.rank()), global_ranks, name, timeout)
        group.set_names(name, group_desc or f"{self.group_desc}:split")
        return group

    def shutdown(self) -> None:
        """Local. Leave the group; idempotent. Ranks that still wait for this one raise an error that names it.

        Unfinished operations are carried out first, for at most two seconds.
        """
        self._leave(0.0 if sys.exc_info()[0] else _LEAVE_SECONDS)

    def abort(self) -> None:
        """Local. Leave the group without finishing its operations; idempotent."""
        self._leave(0.0)

    def _leave(self, seconds: float) -> None:
        if self._has_left:
            return
        self._has_left = True
        deadline = time.monotonic() + seconds
        channels = self._channels.all()
        left = [*(channel.queue.drain(deadline) for channel in channels), self._mail.drain(deadline)]
        for channel in channels:
            channel.queue.close()
            with contextlib.suppress(DistoptError):  # a thread that waits in it raises the error
                channel.communicator.close()
        deadline = time.monotonic() + _LEAVE_SECONDS
        self._mail.join(deadline)
        for channel in channels:
            channel.queue.join(deadline)
        if any(left):
            _log.warning(
                "%s leaves %d operations and messages that nobody has waited for", self._who[self.rank()], sum(left)
            )

    # -- carrying out ------------------------------------------------------------------------------------------------
    def _run(self, opts: Any, tensors: list[Tensor], action: Callable[..., object], *args: Any) -> dist.Work:
        """Carry out `action(*args, seconds)`, which writes `tensors`, now or in its turn."""
        if self._check_nan:
            refuse_nan(tensors, args, self.rank())
        start = _recorded(action, self._start) if is_profiling() else self._start
        try:
            return start(_DEFAULTS if opts is None else opts, tensors, action, *args)
        except DistoptError as error:
            raise as_torch(error) from error

    def _reduce_at_once(self, tensor: Tensor, opts: Any) -> bool:
        """Collective. What `_run` does with an all_reduce if nothing is to be done but the sum; False if there is.

        Each step that it leaves out costs as much as a small sum itself.
        """
        assert self._reduce is not None
        memory = memory_of(tensor, opts.reduceOp, self._reduce_below_bytes)
        if memory is None or is_profiling() or timeline.is_on or callback_owner() is not None:
            return False
        channel = self._channels.first
        with channel.lock:
            if not channel.queue.enter():
                return False
            channel.count += 1
        try:
            self._reduce(tensor, *memory, self._seconds_of(opts))
        except DistoptError as error:
            raise as_torch(error) from error
        finally:
            channel.queue.leave()
        return True

    def _seconds_of(self, opts: Any) -> float:
        seconds = seconds_of(opts.timeout)
        return seconds if seconds > 0 else self.seconds

    def _start(self, opts: Any, tensors: list[Tensor], action: Callable[..., object], *args: Any) -> dist.Work:
        seconds = self._seconds_of(opts)
        channel, collectives = self._channels.of_caller()
        queue, is_async = channel.queue, opts.asyncOp
        # False in callbacks of a backward pass: DDP waits there for the operations that it starts there.
        in_backward = is_async and current_autograd_node() is not None
        with channel.lock:
            channel.count += 1
            if channel.shared_buckets is not None and action is Collectives.all_reduce:
                channel.shared_buckets.consider(args[0], in_backward=in_backward)
            work = None
            if is_async or not queue.enter():
                start = STARTS.get(action)
                whole = partial(action, collectives, *args, seconds)
                start = start and partial(start, collectives, *args)
                work = PendingWork(queue, start, whole, tensors, seconds, number=channel.count, in_backward=in_backward)
                queue.post(work)
        if work is None:
            try:
                if timeline.is_on:
                    with timeline.wait(action.__name__):
                        action(collectives, *args, seconds)
                else:
                    action(collectives, *args, seconds)
            finally:
                queue.leave()
            return CompletedWork(tensors)
        if not is_async:
            work.wait()
            return work
        if in_backward:
            queue.attend_after_backward(work)
        else:
            queue.attend()
        register_work(work, tensors)
        return work


def _recorded(action: Callable[..., object], start: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """`start` with a profiler record named after `action`.

    The record ends with the call: PyTorch writes its end into the memory of the profile even after the profile has
    ended.
    """

    def recorded(*args: Any) -> dist.Work:
        with torch.profiler.record_function(f"distopt:{action.__name__.removesuffix('_list')}"):
            return start(*args)

    return recorded


def _list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _leave_at_exit() -> None:
    """Leave all groups before the interpreter finalizes: a thread that returns to it from C++ later would abort."""
    has_failed = hasattr(sys, "last_type")  # an uncaught exception
    for group in list(_groups):
        group._leave(0.0 if has_failed else _LEAVE_SECONDS)
