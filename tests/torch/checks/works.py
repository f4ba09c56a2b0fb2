"""Works: who carries operations out, when, and in which order."""

import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx
from torch.nn.parallel import DistributedDataParallel

import distopt.torch
from distopt.torch.group.queue import PendingWork

from .ddp import network
from .ranks import Ranks, reduced, same, same_on_all_ranks, values, with_error


def check_inference_mode(r: Ranks) -> None:
    """Works that another thread ends, outside of inference mode."""
    half = dist._make_nccl_premul_sum(0.5)
    with torch.inference_mode():
        sparse, dense, received = torch.eye(3).to_sparse(), torch.ones(3), torch.zeros(6)[::2]
        outs = [torch.zeros(6)[::2] for _ in r.all]
        works = [
            dist.all_reduce(sparse, async_op=True),
            dist.all_reduce(dense, half, async_op=True),
            dist.all_gather(outs, torch.ones(3), async_op=True),
            dist.irecv(received, (r.rank - 1) % r.size),
            dist.isend(torch.ones(3), (r.rank + 1) % r.size),
        ]
        futures = [work.get_future() for work in works]  # threads now end the works
    for future in futures:
        future.wait()
    same(sparse.to_dense(), torch.eye(3) * r.size)
    same(dense, torch.full((3,), r.size / 2))
    same([*outs, received], [torch.ones(3)] * (r.size + 1))


def check_another_default_device(r: Ranks) -> None:
    """Scripts may make tensors on another device than the group's by default."""
    layer = distopt.torch.SyncBatchNorm(3)
    images = values(r.rank, torch.float32, (4, 3, 2, 2)).requires_grad_()
    with torch.device("meta"):
        group = dist.new_group()
        layer(images).square().sum().backward()
        sparse = torch.eye(3, device="cpu").to_sparse()
        dist.all_reduce(sparse, group=group)
        objects = [None] * r.size
        dist.all_gather_object(objects, r.rank, group=group)
        dist.monitored_barrier(group)
        dist.destroy_process_group(group)
    same(sparse.to_dense(), torch.eye(3) * r.size)
    assert objects == [*r.all]
    assert images.grad.device.type == "cpu"
    same_on_all_ranks(layer.running_mean)


def check_works_end_in_order(r: Ranks) -> None:
    tensor, ends = values(r.rank, torch.float32), []
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
    futures = [work.get_future().then(lambda _, i=i: ends.append(i)) for i, work in enumerate(works)]
    works[-1].wait()
    assert all(work.is_completed() for work in works)
    torch.futures.wait_all(futures)
    expected = r.total() * r.size**4
    same(tensor, expected)
    assert ends == sorted(ends)
    same(works[0].result()[0], expected)
    same(works[0].get_future().wait()[0], expected)


def check_ranks_differ_in_what_shares_memory(r: Ranks) -> None:
    """The second sum of every other rank needs the result of its first; the third needs nothing."""
    own = [[values(3 * q + i, torch.float32) for i in range(3)] for q in r.all]
    first = reduced("SUM", [each[0] for each in own])
    second = reduced("SUM", [first if q % 2 else own[q][1] for q in r.all])
    tensors = own[r.rank]
    tensors[1] = tensors[0] if r.rank % 2 else tensors[1]
    out = torch.empty(r.size)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works.append(dist.all_gather_single(out, torch.full((1,), float(r.rank)), async_op=True))
    last = values(r.rank, torch.float32, (99_999,))
    works.append(dist.all_reduce(last, async_op=True))
    for work in works:
        work.wait()
    same(tensors[1], second)
    same(tensors[2], reduced("SUM", [values(3 * q + 2, torch.float32) for q in r.all]))
    same(out, torch.arange(float(r.size)))
    same(last, r.total(shape=(99_999,)))


def check_operations_in_flight(r: Ranks) -> None:
    """As in a backward pass: some buckets are reduced while others are computed, and waits come in any order."""
    sizes = [3, 262_144, 70_001, 1, 0, 524_289, 4096]
    other = r.group()
    for turn in range(4):
        tensors = [values(r.rank + i, torch.float32, (size,)) for i, size in enumerate(sizes)]
        works, ends = [], []
        for i, tensor in enumerate(tensors):
            works.append(dist.all_reduce(tensor, async_op=True, group=other if i % 3 == 2 else None))
            works[-1].get_future().then(lambda _, i=i, ends=ends: ends.append(i))
            torch.randn(60, 60) @ torch.randn(60, 60)
        gathered = torch.empty(5 * r.size)
        dist.all_gather_single(gathered, values(r.rank, torch.float32, (5,)))
        same(gathered, torch.cat(r.each(shape=(5,))))
        for work in works if turn % 2 else works[::-1]:
            work.wait()
        same(tensors, [r.total(shape=(size,), offset=i) for i, size in enumerate(sizes)], turn)
        torch.futures.wait_all([work.get_future() for work in works])
        assert [i for i in ends if i % 3 != 2] == [0, 1, 3, 4, 6], ends


def check_an_operation_goes_on_without_a_wait(r: Ranks) -> None:
    """An operation ends while the rank that started it computes."""
    for _ in range(3):
        tensors = [torch.ones(200_000) for _ in range(3)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        deadline = time.monotonic() + 200
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < deadline
            torch.randn(50, 50) @ torch.randn(50, 50)
        same(tensors, [torch.full((200_000,), float(r.size))] * 3)
        dist.barrier()


def check_orders_of_waiting(r: Ranks) -> None:
    """Ranks may wait for the operations of several groups in different orders, or for none while another rank does."""
    groups = [dist.group.WORLD, r.group()]
    for size in (5, 300_000):
        for turn in range(6):
            tensors = [values(r.rank + turn + i, torch.float32, (size,)) for i in range(4)]
            works = [
                dist.all_reduce(tensor, group=groups[i % 2], async_op=True) if i < 2 else None
                for i, tensor in enumerate(tensors)
            ]
            if turn % 3 == r.rank % 3:
                dist.all_reduce(tensors[2], group=groups[turn % 2])
            for work in works[:: 1 if r.rank % 2 else -1]:
                if work is not None:
                    work.wait()
            if turn % 3 != r.rank % 3:
                dist.all_reduce(tensors[2], group=groups[turn % 2])
            same(tensors[:3], [r.total(shape=(size,), offset=turn + i) for i in range(3)], (size, turn))


def check_threads(r: Ranks) -> None:
    """Groups are independent of each other, whatever the order in which threads use them."""
    groups = [r.group() for _ in range(4)]

    def work(i: int) -> None:
        for step in range(30):
            tensor = values(r.rank + i + step, torch.float32)
            handle = dist.all_reduce(tensor, group=groups[i], async_op=step % 3 == 0)
            if handle:
                handle.wait()
            same(tensor, r.total(offset=i + step))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)[:: -1 if r.rank % 2 else 1]))
    tensors = [torch.ones(1000) for _ in range(40)]
    with ThreadPoolExecutor(4) as pool:  # in one group, one by one; all calls are alike, so any order fits
        list(pool.map(dist.all_reduce, tensors))
    same(tensors, [torch.full((1000,), float(r.size))] * 40)


def check_profiler(r: Ranks) -> None:
    """Records are named as Gloo's, and end with the calls, since works may outlive the profile. Gloo adds none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.destroy_process_group(dist.new_group(list(r.all)))
        dist.all_reduce(torch.ones(3))
        work = dist.all_reduce(torch.ones(3), async_op=True)
        time.sleep(0.1 if r.rank == 1 else 0)
        work.wait()
        work.get_future().wait()
        dist.all_gather([torch.ones(3) for _ in r.all], torch.ones(3))
        dist.barrier()
        late = [dist.irecv(torch.ones(3), (r.rank - 1) % r.size), dist.all_reduce(torch.ones(3), async_op=True)]
    records = [event for event in profile.events() if event.name.startswith("distopt:")]
    dist.send(torch.ones(3), (r.rank + 1) % r.size)
    for work in late:
        work.wait()
    expected = {"distopt:all_reduce": 3, "distopt:all_gather": 1, "distopt:barrier": 1, "distopt:receive": 1}
    assert Counter(event.name for event in records) == expected
    assert not any(event.is_async for event in records), "a record has ended after its call"
    assert not any("gloo" in event.name for event in profile.events())


def check_abandoned_backward_pass(r: Ranks) -> None:
    """Work that it started does not reach the gradients of the next pass."""

    def break_off(_: torch.Tensor) -> None:
        raise ArithmeticError("half-way")

    torch.manual_seed(3)
    layers = [torch.nn.Linear(150, 150, bias=False) for _ in range(4)]
    for trial in range(3):
        model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.05, gradient_as_bucket_view=True)
        for step in range(12):
            x = torch.full((1, 150), float(r.rank + step + trial))
            model.zero_grad()
            model(x).sum().backward()
            mean = torch.cat([torch.full((1, 150), float(q + step + trial)) for q in r.all])
            grads = torch.autograd.grad(torch.nn.Sequential(*layers)(mean).sum() / r.size, [*model.parameters()])
            # Sums have another order; those of another pass differ by 0.5 and more.
            found = [parameter.grad for parameter in model.parameters()]
            torch.testing.assert_close(found, [*grads], rtol=1e-5, atol=1e-4)
        breaking = layers[1].register_forward_hook(lambda *given: given[2].register_hook(break_off) and None)
        for _ in range(1 + trial % 2):
            model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.05)
            with pytest.raises(ArithmeticError, match="half-way"):
                model(torch.ones(1, 150)).sum().backward()
        breaking.remove()


def check_backward_without_a_thread(r: Ranks) -> None:
    """On one host, the thread that computes a backward pass carries out its operations."""
    if len(r.counts) > 1:  # a thread keeps the network busy
        return
    carry_out, threads = PendingWork.carry_out, []

    def recorded(work: PendingWork) -> None:
        if work.in_backward:
            threads.append(threading.get_ident())
        carry_out(work)

    group = r.group()
    model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.005)
    with mock.patch.object(PendingWork, "carry_out", recorded):
        for _ in range(5):
            model(torch.ones(2, 1, 8, 8)).sum().backward()
    assert set(threads) == {threading.get_ident()}
    assert len(threads) >= 5


def check_works_that_compiled_code_waits_for(r: Ranks) -> None:
    """The script drops the works of operations that it calls; `wait_tensor`, as in compiled code, waits for them."""
    wait = torch.ops._c10d_functional.wait_tensor
    with allow_inflight_collective_as_graph_input_ctx():
        for shape in ((3,), (70_000,)):
            tensor = values(r.rank, torch.float32, shape)
            dist.all_reduce(tensor, async_op=True)
            same(wait(tensor), r.total(shape=shape), f"the sum of {shape}")
            parts = [torch.zeros(shape) for _ in r.all]
            dist.all_gather(parts, values(r.rank, torch.float32, shape), async_op=True)
            same(map(wait, parts), r.each(shape=shape), f"parts of {shape}")
            before, received = (r.rank - 1) % r.size, torch.zeros(shape)
            dist.irecv(received, before)
            dist.isend(values(r.rank, torch.float32, shape), (r.rank + 1) % r.size)
            same(wait(received), values(before, torch.float32, shape), f"the message of {shape}")


def check_collectives_in_signal_handlers(r: Ranks) -> None:
    """A handler that waits for a collective of the group whose collective it has interrupted would never return."""
    if len(r.counts) > 1 or r.size == 1:  # between hosts, a handler runs after the wait
        return
    group, store = r.group(timeout=timedelta(seconds=30)), dist.group.WORLD.get_group_store()
    first, second = (torch.full((300,), float(place + r.rank)) for place in (0, 1))
    works = []

    def handle(*_: object) -> None:
        with_error(dist.DistBackendError, "signal handler waits", dist.all_reduce, torch.ones(2), group=group)
        works.append(dist.all_reduce(second, group=group, async_op=True))
        with_error(dist.DistBackendError, "signal handler waits", works[0].wait)
        store.set("signal handled", "")

    if r.rank == 0:
        before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        dist.all_reduce(first, group=group)
        signal.signal(signal.SIGALRM, before)
        works[0].wait()
    else:
        store.wait(["signal handled"], timedelta(seconds=30))
        for own in (first, second):
            dist.all_reduce(own, group=group)
    same([first, second], [torch.full((300,), float(sum(place + q for q in r.all))) for place in (0, 1)])
