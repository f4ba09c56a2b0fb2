"""Messages whose ends disagree: every wait raises the error that names both, and nothing is written."""

from __future__ import annotations

import time
from datetime import timedelta
from multiprocessing.queues import Queue

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

import distopt.torch  # noqa: F401 - registers the backend
from tests.processes import LIMIT_SECONDS

from .forked import CONTEXT, Place, place_of

WAYS = ("sent before", "waits", "other first", "polls", "futures", "sum", "recv")


def rank_main(rank: int, place: Place, method: str, way: str, seconds: float, out: Queue[list[str]]) -> None:
    dist.init_process_group(
        "distopt", init_method=method, rank=rank, world_size=place.size, timeout=timedelta(seconds=seconds)
    )
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        if way != "sent before":
            store.wait(["received"])
        sent = [dist.isend(torch.ones(4), 1), dist.isend(torch.ones(3), 1, tag=1)]
        store.set("sent", "")
        store.wait(["said"])
        del sent
        return
    if way == "sent before":
        store.wait(["sent"])
    tensors = torch.zeros(2), torch.zeros(3)
    works = [dist.irecv(tensor, 0, tag=tag) for tag, tensor in enumerate(tensors)]
    store.set("received", "")
    said = []

    def expect_error(call):
        try:
            call()
        except (dist.DistBackendError, RuntimeError) as error:
            said.append(str(error))
        else:
            said.append("no error")

    if way == "other first":
        works.reverse()
    elif way == "polls":
        while not all(work.is_completed() for work in works):
            time.sleep(1e-3)
    elif way == "futures":
        futures = [work.get_future() for work in works]
        for future in futures:
            expect_error(future.wait)
    elif way == "sum":
        store.wait(["sent"])
        expect_error(lambda: dist.all_reduce(torch.ones(3)))
    elif way == "recv":
        expect_error(lambda: dist.recv(torch.zeros(1), 0, tag=2))
    for work in (*works, *works):
        expect_error(work.wait)
    said += [f"written: {tensor}" for tensor in tensors if tensor.any()]
    out.put(said)
    store.set("said", "")


def run(ranks: str, way: str, seconds: float) -> tuple[list[str], list[int | None]]:
    with place_of(ranks) as place:
        out: Queue[list[str]] = CONTEXT.Queue()
        processes = place.start(rank_main, place, place.method(), way, seconds, out)
        try:
            processes[1].join(LIMIT_SECONDS)
            said = out.get(timeout=60) if processes[1].exitcode == 0 else []
            processes[0].join(60)
        finally:
            for process in processes:
                process.kill()
        return said, [process.exitcode for process in processes]


@pytest.mark.slow(kept=2)
@pytest.mark.sweep(rest=2)
@pytest.mark.parametrize("way", WAYS)
def test_every_wait_raises_the_mismatch(way: str) -> None:
    said, codes = run("2", way, 120.0)
    assert codes[1] == 0
    assert len(said) >= 4
    for text in said:
        assert "sent 4 float32 with tag 0, where rank 1" in text, said


# Counts and types of both ends, whose messages Gloo would take, or end the process.
APART = [
    (torch.ones(4), torch.zeros(2)),
    (torch.ones(512), torch.zeros(256)),
    (torch.ones(256), torch.zeros(512)),
    (torch.ones(4), torch.zeros(4, dtype=torch.int32)),
]


def rank_of_a_host(rank: int, place: Place, method: str, out: Queue[list[str]]) -> None:
    dist.init_process_group("distopt", init_method=method, rank=rank, world_size=2, timeout=timedelta(seconds=8))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        sent = [dist.isend(tensor, 1, tag=tag) for tag, (tensor, _) in enumerate(APART)]
        store.wait(["said"], timedelta(seconds=LIMIT_SECONDS))
        del sent
        return
    works = [dist.irecv(tensor, 0, tag=tag) for tag, (_, tensor) in enumerate(APART)]
    said = []
    for work in works:
        with pytest.raises(dist.DistBackendError) as caught:
            work.wait()
        said.append(str(caught.value))
    out.put(said + [f"written: {tensor}" for _, tensor in APART if tensor.any()])
    store.set("said", "")


@pytest.mark.slow
@pytest.mark.usefixtures("net")
def test_between_hosts_messages_that_differ_do_not_meet() -> None:
    with place_of("1+1") as place:
        out: Queue[list[str]] = CONTEXT.Queue()
        ranks = place.start(rank_of_a_host, place, place.method(), out)
        ranks[1].join(LIMIT_SECONDS)
        for process in ranks:
            process.kill()
        assert ranks[1].exitcode == 0
        said = out.get(timeout=60)
    assert len(said) == len(APART)
    for text in said:
        assert "rank 0 (host distopt-a" in text, said
        assert "sent 4 float32 with tag 0, where rank 1 (host distopt-b" in text, said
