"""Messages between two ranks."""

import itertools
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from ..forked import on_emulated_host
from .ranks import MOVED, Ranks, same, values


def check_messages(r: Ranks) -> None:
    after, before = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    for dtype, lay in itertools.product(MOVED, r.layouts.values()):
        out = lay(values(9, dtype))
        sent = dist.isend(lay(values(r.rank, dtype)), after, tag=7)
        work = dist.irecv(out, before, tag=7)
        work.wait()
        sent.wait()
        same(out, lay(values(before, dtype)), dtype)
    large = [torch.zeros(3_000_001), torch.zeros(5)]
    ops = [
        dist.P2POp(dist.isend, torch.full((5,), 5.0 + r.rank), after, tag=1),
        dist.P2POp(dist.isend, torch.full((3_000_001,), 1.5 + r.rank), after, tag=2),
        dist.P2POp(dist.irecv, large[0], before, tag=2),
        dist.P2POp(dist.irecv, large[1], before, tag=1),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(large[0], torch.full((3_000_001,), 1.5 + before))
    same(large[1], torch.full((5,), 5.0 + before))


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
