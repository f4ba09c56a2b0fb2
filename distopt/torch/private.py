"""Every name outside PyTorch's documented interface that `distopt.torch` uses, and no other file of the package.

`distopt.autoload`, which runs before this package is imported, has two that are in the table here.
`USES` says what each name is for; `tests/torch/test_private.py` fails with a sentence if a version of PyTorch lacks
one. Tried on PyTorch 2.13.0, the oldest supported, and 2.14.1.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing import reductions
from torch.nn.modules import batchnorm
from torch.utils.data import dataloader

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

_Kind = TypeVar("_Kind", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_bindings = torch._C._distributed_c10d

_AUTOGRAD = "to tell whether, and in which backward pass, a collective is called"
_COMPILER = "to keep torch.compile from tracing the group"
_MOVES = "to move DDP's buckets into shared memory"
_ORDER = "to save and restore the order of DDP's buckets"
_WALK = "to notice that buffers or modules of a model are others, without a walk through it"
_COMPILED = "to let compiled code wait for operations that were called outside of it"
_GROUP = "to answer torch.distributed, which asks every process group for it"
_BACKEND = "to let C++ call a process group of Python"

# "torch has no NAME, which distopt.torch uses ...": each name, and the end of this sentence. A path begins at the
# module torch, or at `ddp`, a DistributedDataParallel. Under torch._dynamo, it ends with an attribute of models or
# functions.
USES = {
    "torch._C._current_autograd_node": _AUTOGRAD,
    "torch._C._current_graph_task_id": _AUTOGRAD,
    "torch.autograd.Variable._execution_engine.queue_callback": "to carry out collectives after a backward pass",
    "torch.autograd.graph._engine_run_backward": "to find on the stack that DDP asks for a future from C++",
    "torch._C._autograd._profiler_enabled": "to add records to a profile",
    "torch._C._dynamo.eval_frame._FrameAction.SKIP": _COMPILER,
    "torch._C._dynamo.eval_frame._FrameExecStrategy": _COMPILER,
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": _COMPILER,
    "torch._dynamo._torchdynamo_disable": _COMPILER,
    "torch._dynamo._orig_mod": "to save a compiled model under the model's own names",
    "torch.utils.data.dataloader._BaseDataLoaderIter._reset": "to notice a loader that keeps its workers for an epoch",
    "torch.UntypedStorage._cdata": _MOVES,
    "torch.UntypedStorage._swap_data_ptr_": _MOVES,
    "torch.multiprocessing.reductions.StorageWeakRef.expired": _MOVES,
    "torch._foreach_copy_": "to copy the gradients of a bucket at once",
    "torch.Tensor._version": "to tell whether a backward pass has added to a gradient",
    "torch.Tensor._base": "to write the sum of complex sparse tensors",
    "torch._C._distributed_c10d._allow_inflight_collective_as_graph_input": _COMPILED,
    "torch._C._distributed_c10d._create_work_from_future": _COMPILED,
    "torch._C._distributed_c10d._register_work": _COMPILED,
    "torch.nn.modules.batchnorm._BatchNorm._check_input_dim": "to derive SyncBatchNorm",
    "torch.ops.aten.native_batch_norm_backward": "to compute SyncBatchNorm's gradients",
    "ddp.reducer._rebuild_buckets": _ORDER,
    "ddp.reducer._get_zeros_like_grad_buckets": _ORDER,
    "ddp._has_rebuilt_buckets": _ORDER,
    "ddp._buffers": _WALK,
    "ddp._modules": _WALK,
    "torch.distributed.Reducer._set_forward_pass_work_handle": "to keep the works of DDP's join",
    "torch.distributed.Work._source_rank": "to answer torch.distributed.recv, which asks who has sent a message",
    "torch.distributed.Backend.backend_type_map": "to serve the CPU tensors of a group beside another backend",
    "torch.distributed.distributed_c10d.BackendConfig.get_device_backend_map": "to take Gloo's place",
    "torch.distributed.distributed_c10d.monitored_barrier": "to have the function serve groups of distopt, too",
    "torch.distributed.ProcessGroup._set_group_name": _GROUP,
    "torch.distributed.ProcessGroup._set_group_desc": _GROUP,
    "torch.distributed.ProcessGroup._device_types": _GROUP,
    "torch.distributed.ProcessGroup._get_backend": _GROUP,
    "torch.distributed.ProcessGroup._get_sequence_number_for_group": _GROUP,
    "torch.distributed.ProcessGroup._set_sequence_number_for_group": _GROUP,
    "torch.distributed.ProcessGroup._allgather_base": _GROUP,
    "torch.distributed.ProcessGroup._reduce_scatter_base": _GROUP,
    "torch.distributed.ProcessGroup._register_backend": _BACKEND,
    "torch.distributed.ProcessGroup._set_default_backend": _BACKEND,
    "torch.distributed.ProcessGroup.BackendType.CUSTOM": _BACKEND,
    "torch._C._distributed_c10d.Backend": _BACKEND,
}

# Names that later versions lack and do not need, by the first of these versions.
UNNEEDED_SINCE = {"torch.distributed.ProcessGroup._set_sequence_number_for_group": (2, 14)}

# -- autograd ---------------------------------------------------------------------------------------------------------
# Local. The node of the graph that runs in this thread; None outside of a backward pass and in the callbacks at its
# end.
current_autograd_node: Callable[[], torch.autograd.graph.Node | None] = torch._C._current_autograd_node
# Local. The number of the backward pass, callbacks included, that this thread runs; negative if it runs none.
current_backward_pass: Callable[[], int] = torch._C._current_graph_task_id


def call_after_backward(callback: Callable[[], None]) -> None:
    """Local, in a backward pass. Have this thread call `callback` at the end of the pass, after earlier callbacks."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# PyTorch does not say who calls a method of Python. The two functions below find out by `sys._getframe`.
# The function that runs a backward pass. C++ that it calls has no frame of its own.
BACKWARD: CodeType = torch.autograd.graph._engine_run_backward.__code__
# The method by which a loader with persistent workers begins another epoch.
LOADER_RESET: CodeType = dataloader._BaseDataLoaderIter._reset.__code__


def called_by(code: CodeType) -> bool:
    """Local. Whether the function that calls this one was itself called by `code`."""
    caller = sys._getframe(1).f_back
    return caller is not None and caller.f_code is code


def is_nested_backward() -> bool:
    """Local. Whether this thread runs a backward pass inside of another one, as reentrant checkpointing does."""
    frame, count = sys._getframe().f_back, 0
    while frame is not None and count < 2:
        count += frame.f_code is BACKWARD
        frame = frame.f_back
    return count > 1


# -- tensors ----------------------------------------------------------------------------------------------------------
# Local. Copy each of some tensors, `foreach_copy(targets, sources)`: on a GPU by few launches.
foreach_copy: Callable[..., None] = torch._foreach_copy_


# -- profiler ---------------------------------------------------------------------------------------------------------
# Local. Whether a profile is being recorded.
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


# -- torch.compile ----------------------------------------------------------------------------------------------------
def untraced(kind: _Kind) -> _Kind:
    """Local. Have compiled code call the methods of class `kind` without tracing them, as it calls a group of C++.

    `torch.compiler.disable` does that, too, but wraps every method, which costs 2.5 microseconds per call.
    """
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            untraced_function(method)
    return kind


def untraced_function(function: _Function) -> _Function:
    """Local. Have compiled code, also that of compiled autograd, call a function without tracing it."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined] # for callers that are traced
    with contextlib.suppress(ImportError):  # PyTorch built without a compiler
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(function.__code__, strategy)  # for callers outside of a graph
    return function


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Local. The model that torch.compile has wrapped, or `model` itself."""
    inner: torch.nn.Module = getattr(model, "_orig_mod", model)
    return inner


# -- tensors and storages ---------------------------------------------------------------------------------------------
StorageWeakRef = reductions.StorageWeakRef


def key_of(storage: torch.UntypedStorage) -> int:
    """Local. A number for the storage, unique as long as the storage or a `StorageWeakRef` to it exists."""
    key: int = storage._cdata
    return key


def take_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> torch.UntypedStorage:
    """Local. Give the memory of `other` to `storage`, and so to every tensor that views `storage`.

    Returns:
        A storage that has the old memory of `storage`. `other` is empty afterwards.
    """
    old = torch.UntypedStorage(0)
    storage._swap_data_ptr_(old)  # in two steps: PyTorch exchanges different sizes only if one of them is 0
    storage._swap_data_ptr_(other)
    return old


def complex_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """Local. The complex tensor that `tensor` views as real numbers, if there is one."""
    base: torch.Tensor | None = tensor._base
    return base if base is not None and base.is_complex() else None


# -- works ------------------------------------------------------------------------------------------------------------
def register_work(work: dist.Work, tensors: Sequence[torch.Tensor]) -> None:
    """Local. Tell `wait_tensor` of a work, where a script lets compiled code wait for operations called outside of it.

    PyTorch itself does so in C++, which calls to a process group of Python do not enter.
    """
    if _bindings._allow_inflight_collective_as_graph_input():
        kept = _bindings._create_work_from_future(work.get_future())  # C++ would not keep the work itself
        for tensor in tensors:
            _bindings._register_work(tensor, kept)


# -- batch normalization ----------------------------------------------------------------------------------------------
class BatchNorm(batchnorm._BatchNorm):
    """The common base of PyTorch's batch normalizations. Subclasses define `check_input`."""

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - PyTorch's name
        self.check_input(input)


def is_batch_norm(module: torch.nn.Module) -> bool:
    """Local. Whether a module is a batch normalization of PyTorch's, or derives from one."""
    return isinstance(module, batchnorm._BatchNorm)


# Local. The gradients of torch.nn.functional.batch_norm.
batch_norm_backward: Callable[..., tuple[torch.Tensor, ...]] = torch.ops.aten.native_batch_norm_backward


# -- DistributedDataParallel ------------------------------------------------------------------------------------------
def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Collective if the layout of the buckets is to change at the next forward pass: change it now. Else local."""
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True


def has_rebuilt_buckets(ddp: DistributedDataParallel) -> bool:
    """Local. Whether the layout of the buckets is final."""
    return bool(ddp._has_rebuilt_buckets)


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Local. The buffers of a module alone, by name: the module's dictionary itself, so that changes show."""
    buffers: dict[str, torch.Tensor | None] = module._buffers
    return buffers


def own_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Local. The modules in a module, by name: the dictionary itself."""
    modules: dict[str, torch.nn.Module | None] = module._modules
    return modules


def parameters_by_bucket(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    """Local. The parameters in the order of the buckets, and in their order there."""
    return [parameter for bucket in ddp.reducer._get_zeros_like_grad_buckets() for parameter in bucket.parameters()]


def keep_works_of_join() -> None:
    """Local. Have DDP keep the works that its `join` starts in forward passes and reads in backward passes.

    C++ alone does not keep a work of Python: its end would never come.
    """
    kept: weakref.WeakKeyDictionary[Any, dist.Work] = weakref.WeakKeyDictionary()
    original = dist.Reducer._set_forward_pass_work_handle

    def keeping(reducer: Any, work: dist.Work, use_static_world_size: bool) -> None:
        kept[reducer] = work
        original(reducer, work, use_static_world_size)

    dist.Reducer._set_forward_pass_work_handle = keeping


# -- groups -----------------------------------------------------------------------------------------------------------
def replace_monitored_barrier(function: Callable[..., None]) -> None:
    """Local. Have users, and PyTorch itself, call `function` for `torch.distributed.monitored_barrier`."""
    dist.monitored_barrier = c10d.monitored_barrier = function


class Received:
    """A work that says who has sent a message. Subclasses define `source_rank`."""

    def _source_rank(self) -> int:
        rank: int = self.source_rank()  # type: ignore[attr-defined]
        return rank


class Abilities:
    """The abilities that PyTorch asks groups and backends for."""

    supports_splitting = True
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    _supports_time_estimate = False


@untraced
class NamedGroup(Abilities, dist.ProcessGroup):
    """A process group of Python: what PyTorch calls by private names. Subclasses define the collectives.

    `dist.ProcessGroup` answers the questions for names only if it has a backend of C++.

    Attributes:
        count: operations that have been called, the same on all ranks. Subclasses define it.
        seconds: how long operations wait for a rank. Subclasses define it.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # the constructor with a store makes no object that C++ can call
        self._names = {"name": "", "desc": ""}

    def set_names(self, name: str, description: str) -> None:
        """Local. Set what `getGroupName` and `getGroupDesc` return."""
        self._names.update(name=name, desc=description)

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's
        """Local. "distopt"."""
        return "distopt"

    @property
    def options(self) -> Any:
        """Local. Name and timeout, as of a backend of C++."""
        return _bindings.Backend.Options("distopt", timedelta(seconds=self.seconds))

    def getGroupName(self) -> str:  # noqa: N802 - PyTorch's
        """Local. The name that PyTorch has given the group."""
        return self._names["name"]

    def getGroupDesc(self) -> str:  # noqa: N802 - PyTorch's
        """Local. The user's description of the group."""
        return self._names["desc"]

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _set_group_name(self, name: str) -> None:
        self._names["name"] = name

    def _set_group_desc(self, desc: str) -> None:
        self._names["desc"] = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> dist.ProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"the backend distopt serves CPU tensors, not those on {device}; make a group for these")
        return self

    def _get_sequence_number_for_group(self) -> int:
        number: int = self.count
        return number

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: all ranks count from the start."""

    # Older names of two collectives; FSDP still uses them.
    def _allgather_base(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single(out, tensor, opts)

    def _reduce_scatter_base(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> dist.Work:
        return self.reduce_scatter_single(out, tensor, opts)


class _Backend(Abilities, torch._C._distributed_c10d.Backend):
    """Forwards what C++ asks a backend for to the group in Python."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)  # the group keeps its backend

    def __repr__(self) -> str:
        return f"<backend of {self._group()!r}>"

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's
        return "distopt"

    def _get_sequence_number_for_group(self) -> int:
        number: int = self._asked().count
        return number

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: all ranks count from the start."""

    def _asked(self) -> Any:
        group = self._group()
        if group is None:
            raise dist.DistBackendError("the process group has been destroyed; make a new one")
        return group


def _forwarded(name: str) -> Any:
    def forward(self: _Backend, *args: Any) -> Any:
        return getattr(self._asked(), name)(*args)

    return forward


for _name in (
    *("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "broadcast", "allgather", "allgather_coalesced", "all_gather_single"),
    *("all_gather_single_coalesced", "gather", "scatter", "alltoall", "all_to_all_single", "barrier"),
    *("send", "recv", "recv_anysource", "set_timeout"),
):
    setattr(_Backend, _name, _forwarded(_name))


class _Part(_Backend):
    """The backend for CPU tensors of a group of C++, which has others for other devices. Lasts until it is shut down.

    C++ alone does not keep a backend of Python, nor does that keep its group.
    """

    supports_splitting = False
    _kept: dict[_Part, dist.ProcessGroup] = {}  # noqa: RUF012 - of all

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._kept[self] = group

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool) -> None:
        """Collective. `DistoptProcessGroup.monitored_barrier` of the group that has been asked for."""
        self._asked().monitored_barrier(opts.timeout, wait_all_ranks)

    def shutdown(self) -> None:
        """Local. Leave the group; idempotent."""
        if self in self._kept:
            self._kept.pop(self).shutdown()

    def abort(self) -> None:
        """Local. Leave the group without finishing its operations; idempotent."""
        if self in self._kept:
            self._kept.pop(self).abort()


def part_of(group: dist.ProcessGroup) -> Any:
    """Local. A backend for PyTorch to put into a group of C++, whose CPU tensors `group` then serves. From 2.14 on."""
    return _Part(group)


def give_backend(group: dist.ProcessGroup) -> object:
    """Local. Register a backend with `group`, which must keep what is returned. None before PyTorch 2.14.

    From 2.14 on, C++ can call a backend of Python, and its operators look for one.
    """
    with contextlib.suppress(TypeError):  # before 2.14, the class has no constructor
        backend = _Backend(group)
        custom = dist.ProcessGroup.BackendType.CUSTOM
        dist.ProcessGroup._register_backend(group, torch.device("cpu"), custom, backend)
        group._set_default_backend(custom)
        return backend
    return None


def version_of(tensor: torch.Tensor) -> int:
    """Local. How often a tensor has been changed in place since it was made."""
    return int(tensor._version)
