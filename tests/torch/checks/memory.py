"""Memory of tensors that a group reduces: resized, moved into shared memory, seen by others."""

import gc
import itertools
import math
import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader, TensorDataset

import distopt.torch
from distopt.torch.ddp.shared_buckets import SharedBuckets

from .collectives import all_reduce, calls_of
from .ddp import drawn, learn, reference_cnn
from .ranks import TIMEOUT_SECONDS, Ranks, open_files, same, same_on_all_ranks, values, with_error


def check_tensors_can_be_resized(r: Ranks) -> None:
    """Tensors can be resized after every collective and message: FSDP and DDP's hooks free and refill storages."""
    after, before = (r.rank + 1) % r.size, (r.rank - 1) % r.size

    def exchange(tensor: torch.Tensor, other: torch.Tensor, source: int | None) -> None:
        sent = dist.isend(tensor, after)
        dist.irecv(other, source).wait()
        sent.wait()

    def coalesced(tensor: torch.Tensor, other: torch.Tensor) -> None:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, after), dist.P2POp(dist.irecv, other, before)])
        for work in works:
            work.wait()

    def made(dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, Callable[[], object]]]:
        """Tensors, and calls that use some of them."""
        x, other, parts = values(r.rank, dtype), values(r.rank, dtype), r.each(dtype)
        whole = values(r.rank, dtype, (r.size * 2, 5, 3))
        calls = calls_of(r, x, parts, whole) | {"product": lambda: all_reduce(x, dist.ReduceOp.PRODUCT)}
        calls |= {"message": lambda: exchange(x, other, before), "batch_isend_irecv": lambda: coalesced(x, other)}
        if r.size == 2 and len(r.counts) == 1:
            calls["message from anyone"] = lambda: exchange(x, other, None)
        return [x, other, *parts, whole], calls

    dtypes = (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64)
    for dtype, name in itertools.product(dtypes, made(torch.float32)[1]):
        tensors, calls = made(dtype)
        calls[name]()
        for tensor in tensors:
            kept = tensor.clone()
            tensor.resize_(1000)
            same(tensor[: kept.numel()], kept.view(-1), (dtype, name))
            tensor.untyped_storage().resize_(0)
            tensor.untyped_storage().resize_(4000)
    sparse = values(r.rank, torch.float32).to_sparse()
    dist.all_reduce(sparse)
    sparse.coalesce().values().resize_(1000)
    empty = torch.ones(30)
    empty.untyped_storage().resize_(0)
    with_error(ValueError, "is empty", dist.all_reduce, empty)


def moved_storages(group: dist.ProcessGroup) -> int:
    """How many storages have moved into the wire memory of `group`."""
    wire = group._channels.first.shared_buckets
    return sum(seen.has_memory and seen.memory is None for seen in wire._seen.values()) if wire else 0


class Checkpointed(torch.nn.Module):
    """The reference CNN with recomputed activations, and with a layer that not every rank uses."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self._layers, self._last, self._reentrant = reference_cnn(), torch.nn.Linear(10, 10), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint_sequential(self._layers, 3, x.requires_grad_(), use_reentrant=self._reentrant)
        return self._last(y) if self._reentrant or x.sum() > 0 else y


def steps_of_ddp(
    rank: int,
    groups: list[dist.ProcessGroup],
    net: Callable[[], torch.nn.Module] = reference_cnn,
    *,
    clears: bool = True,
    clips: bool = False,
    **options: object,
) -> list[torch.Tensor]:
    """Train as users do; the parameters and the last gradients of a rank."""
    arrays = []
    models = [DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.5, **options) for group in groups]
    optimizers = [torch.optim.SGD(model.parameters(), 0.02, momentum=0.9) for model in models]
    generator = torch.Generator().manual_seed(rank)
    for step in range(22):
        x, y = drawn(generator, 2, 28)
        for model, optimizer in zip(models, optimizers, strict=True):
            if step == 20:
                with model.no_sync():
                    torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.zero_grad(set_to_none=clears)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            # PyTorch does not know these views, which must stay readable when the bucket moves.
            arrays.append(np.from_dlpack(next(model.parameters()).grad))
    assert all(math.isfinite(array.sum()) for array in arrays)
    every = [each for model in models for param in model.parameters() for each in (param, param.grad)]
    return [tensor.detach().clone() for tensor in every if tensor is not None]


def check_buckets_in_wire_memory(r: Ranks) -> None:
    other, view = r.group(), {"gradient_as_bucket_view": True}
    for options in (
        {"clips": True},
        {"clears": False, **view},
        {"static_graph": True},
        {"net": partial(Checkpointed, reentrant=False), "find_unused_parameters": True, **view},
        {"net": partial(Checkpointed, reentrant=True), **view},
        {"net": partial(Checkpointed, reentrant=True), "static_graph": True},
    ):
        ours = steps_of_ddp(r.rank, [dist.group.WORLD, other], **options)
        theirs = steps_of_ddp(r.rank, [r.gloo], **options)
        same_on_all_ranks(ours, options)
        r.same_as_gloo(ours, theirs * 2, options, rtol=1e-3, atol=1e-4)
    if min(r.counts) > 1:
        assert (wire := other._channels.first.shared_buckets) is not None
        assert sum(map(len, wire._free.values())) > 0, "the memory of discarded models has not come back"


def sum_in_backward(buffer: torch.Tensor) -> None:
    """Collective. Start a sum inside a backward pass, as a hook does."""
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: dist.all_reduce(buffer, async_op=True) and None)
    x.sum().backward()


def agree_anew() -> None:
    """Collective. Have the ranks agree on moves as frequently as in a new group."""
    channel = dist.group.WORLD._channels.first
    if channel.shared_buckets is not None:
        channel.shared_buckets = SharedBuckets(channel.communicator, channel._post, TIMEOUT_SECONDS)


def check_memory_seen_elsewhere_stays(r: Ranks) -> None:
    """Memory that an array, another process or a file shares stays in place, on rank 0 alone or on all ranks."""
    count, folder = 20_000, TemporaryDirectory()

    def shared() -> tuple[torch.Tensor, torch.Tensor]:
        buffer = torch.zeros(count).share_memory_()
        other = torch.UntypedStorage._new_shared_fd_cpu(*buffer.untyped_storage()._share_fd_cpu_())
        return buffer, torch.tensor([]).set_(other)

    def of_array(array: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(array), torch.from_numpy(array)

    makes = {
        "share_memory_": shared,
        "array": lambda: of_array(np.zeros(count, np.float32)),
        "memmap": lambda: of_array(np.memmap(Path(folder.name, "buffer"), np.float32, "w+", shape=count)),
        "file": lambda: [torch.from_file(f"{folder.name}/file", shared=True, size=count) for _ in range(2)],
    }
    for (kind, make), alone in itertools.product(makes.items(), (True, False)):
        agree_anew()
        exports = r.rank == 0 or not alone
        buffer, seen = make() if exports else (torch.zeros(count),) * 2
        for step in range(26):
            buffer.fill_(r.rank + step)
            sum_in_backward(buffer)
            expected = torch.full((count,), float(sum(q + step for q in r.all)))
            same((buffer, seen), (expected, expected), (kind, alone, step))
    # At any step: also between the ranks' agreement and the move. Another array keeps what it reads, too.
    for at, alone in itertools.product((0, 5, 7, 8, 9, 12, 15, 16, 17, 20), (True, False)):
        agree_anew()
        buffer, array = torch.zeros(count), None
        for step in range(28):
            if step == at and (r.rank == 0 or not alone):
                array = buffer.numpy()
            buffer.fill_(r.rank + step)
            sum_in_backward(buffer)
            expected = torch.full((count,), float(sum(q + step for q in r.all)))
            same(buffer, expected, (at, alone, step))
            assert array is None or (array == expected.numpy()).all(), (at, alone, step)
        if at == 20 and min(r.counts) > 1:
            assert moved_storages(dist.group.WORLD) == 1


def check_data_loader_workers(r: Ranks) -> None:
    """Forked workers share the memory of the buckets with their rank; spawned workers import this package."""
    groups = r.group(), r.gloo
    models = [DistributedDataParallel(reference_cnn(), process_group=group) for group in groups]
    optimizers = [torch.optim.SGD(model.parameters(), 0.02, momentum=0.9) for model in models]
    generator = torch.Generator().manual_seed(r.rank)
    images, labels = drawn(generator, 40, 28)
    for method in ("spawn" if r.rank == 0 else "fork", "fork"):  # to spawn takes seconds
        for x, y in DataLoader(TensorDataset(images, labels), 2, num_workers=1, multiprocessing_context=method):
            for model, optimizer in zip(models, optimizers, strict=True):
                learn(model, optimizer, (x, y))
    assert (moved_storages(groups[0]) > 0) == (min(r.counts) > 1)
    r.same_as_gloo(*(model.parameters() for model in models), rtol=1e-3, atol=1e-4)


def check_memory_outlives_the_group(r: Ranks) -> None:
    for _ in range(2):
        group = dist.new_group(list(r.all))
        model = DistributedDataParallel(reference_cnn(), process_group=group, gradient_as_bucket_view=True)
        for _ in range(20):
            model(torch.ones(1, 1, 28, 28)).sum().backward()
        assert (moved_storages(group) > 0) == (min(r.counts) > 1)
        grads = [parameter.grad for parameter in model.parameters()]
        before = [grad.clone() for grad in grads]
        dist.destroy_process_group(group)
        if r.rank % 2:
            del model
            gc.collect()
        same(grads, before)
        grads[0].fill_(r.rank)
        same(grads[0], torch.full_like(before[0], r.rank))


def check_discarded_models(r: Ranks) -> None:
    def cycle() -> None:
        model = DistributedDataParallel(torch.nn.Linear(300, 200), gradient_as_bucket_view=True)
        for _ in range(18):
            model(torch.ones(2, 300)).sum().backward()

    def used() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return open_files(), sum("memfd" in line for line in maps)

    agree_anew()
    for _ in range(3):
        cycle()
    before = used()
    for _ in range(int(os.environ.get("MODELS", "10"))):
        cycle()
    # How many models have memory at a time depends on where they end between two agreements.
    assert all(now <= then + 2 for now, then in zip(used(), before, strict=True)), (used(), before)


def check_discarded_dist_opts(r: Ranks) -> None:
    """Models whose DistOpt was not closed are freed, whether they were converted or not."""
    for converted in (False, True):
        model = torch.nn.Linear(30, 20)
        optimizer = distopt.torch.DistOpt(torch.optim.SGD(model.parameters(), 0.1), model=model)
        for _ in range(2):
            model(torch.ones(2, 30)).sum().backward()
            optimizer.step()
            if converted:
                model.double().float()
        params = [weakref.ref(param) for param in model.parameters()]
        del model, optimizer
        gc.collect()
        assert [param() for param in params] == [None, None], converted
