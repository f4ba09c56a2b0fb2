"""Messages between two ranks."""

import itertools
import socket
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from ..forked import on_emulated_host
from .ranks import MOVED, Ranks, same, values, with_error


def check_messages(r: Ranks) -> None:
    after, before = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    for dtype, lay in itertools.product(MOVED, r.layouts.values()):
        out = lay(values(9, dtype))
        sent = dist.isend(lay(values(r.rank, dtype)), after, tag=7)
        dist.irecv(out, before, tag=7).wait()
        sent.wait()
        same(out, lay(values(before, dtype)), dtype)
    sizes = (3_000_001, 5)  # the large one is sent last
    large = [torch.zeros(size) for size in sizes]
    ops = [dist.P2POp(dist.isend, torch.full((size,), 1.5 + r.rank), after, tag=size) for size in sizes[::-1]]
    ops += [dist.P2POp(dist.irecv, tensor, before, tag=len(tensor)) for tensor in large]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(large, [torch.full((size,), 1.5 + before) for size in sizes])


def check_messages_that_differ(r: Ranks) -> None:
    """Every wait raises the error that names both ends, and nothing is written."""
    group, store, last = r.group(timeout=timedelta(seconds=8)), dist.group.WORLD.get_group_store(), r.size - 1
    # Counts and types of both ends, whose messages Gloo would take, or end the process.
    apart = [(torch.ones(sent), torch.zeros(received)) for sent, received in ((4, 2), (512, 256), (256, 512))]
    apart.append((torch.ones(4), torch.zeros(4, dtype=torch.int32)))
    hosts = [None] * r.size
    dist.all_gather_object(hosts, socket.gethostname())
    if r.rank == 0:
        sent = [dist.isend(tensor, last, group, tag) for tag, (tensor, _) in enumerate(apart)]
        store.wait(["said"], timedelta(seconds=60))
        del sent
    elif r.rank == last:
        works = [dist.irecv(tensor, 0, group, tag) for tag, (_, tensor) in enumerate(apart)]
        text = rf"rank 0 \(host {hosts[0]}.* sent 4 float32 with tag 0, where rank {last} \(host {hosts[last]}"
        for work in works:
            for wait in (work.get_future().wait, work.wait):
                with_error(RuntimeError, text, wait)
        assert not any(tensor.any() for _, tensor in apart)
        store.set("said", "")


def check_empty_messages(r: Ranks) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        ours = [dist.isend(torch.ones(0, dtype=dtype), (r.rank + 1) % r.size)]
        ours += [dist.irecv(torch.ones(0, 3, dtype=dtype), (r.rank - 1) % r.size)]
        for work in ours:
            work.wait()
            assert work.is_success()
    out = torch.zeros(3)
    after = dist.isend(values(r.rank, torch.float32, (3,)), (r.rank + 1) % r.size)
    dist.irecv(out, (r.rank - 1) % r.size).wait()
    after.wait()
    same(out, values((r.rank - 1) % r.size, torch.float32, (3,)), "a message after empty ones")


def check_messages_from_anyone(r: Ranks) -> None:
    if r.rank == 0:
        sources = set()
        for _ in range(r.size - 1):
            out = torch.zeros(3)
            source = dist.recv(out)
            same(out, values(source, torch.float32, (3,)))
            sources.add(source)
        assert sources == set(range(1, r.size))
    else:
        dist.send(values(r.rank, torch.float32, (3,)), 0)


def check_messages_move_without_waiting(r: Ranks) -> None:
    """A large message arrives though the sender does nothing more with the group; its future completes."""
    if r.rank == 0:
        works = [dist.isend(torch.full((2_000_000,), 2.5), q) for q in range(1, r.size)]
        world = dist.group.WORLD
        world.monitored_barrier(timedelta(seconds=30))
        # Between hosts a message is completed only after `wait`, as with Gloo.
        assert on_emulated_host() or all(work.is_completed() for work in works)
    else:
        out = torch.zeros(2_000_000)
        work = dist.irecv(out, 0)
        future = work.get_future()  # a thread waits for it, at the same time as this one
        work.wait()
        (found,) = future.wait()
        same(found, torch.full((2_000_000,), 2.5))
        dist.group.WORLD.monitored_barrier(timedelta(seconds=30))


def check_messages_of_several_threads(r: Ranks) -> None:
    """Threads that wait for messages do not block threads that send them."""
    peer = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    outs = [torch.zeros(1000) for _ in range(4)]
    threads = [threading.Thread(target=dist.recv, args=(out, peer[1], None, tag)) for tag, out in enumerate(outs)]
    for thread in threads:
        thread.start()
    dist.barrier()
    for tag in (3, 1, 0, 2):
        dist.send(torch.full((1000,), float(tag)), peer[0], tag=tag)
    for tag, (thread, out) in enumerate(zip(threads, outs, strict=True)):
        thread.join()
        same(out, torch.full((1000,), float(tag)))
