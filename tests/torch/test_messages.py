"""Messages whose ends disagree: every wait raises the error that names both, and nothing is written."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.queues import Queue

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

import distopt.torch  # noqa: F401 - registers the backend
from tests.processes import LIMIT_SECONDS

from .forked import CONTEXT, Place, place_of

# Counts and types of both ends, whose messages Gloo would take, or end the process.
APART = [
    (torch.ones(4), torch.zeros(2)),
    (torch.ones(512), torch.zeros(256)),
    (torch.ones(256), torch.zeros(512)),
    (torch.ones(4), torch.zeros(4, dtype=torch.int32)),
]


def rank_main(rank: int, place: Place, method: str, out: Queue[list[str]]) -> None:
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
        for wait in (work.get_future().wait, work.wait):
            with pytest.raises(RuntimeError) as caught:
                wait()
            said.append(str(caught.value))
    out.put(said + [f"written: {tensor}" for _, tensor in APART if tensor.any()])
    store.set("said", "")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["2", "1+1"])
def test_messages_that_differ_do_not_meet(ranks: str, request: pytest.FixtureRequest) -> None:
    if ranks == "1+1":
        request.getfixturevalue("net")
    with place_of(ranks) as place:
        out: Queue[list[str]] = CONTEXT.Queue()
        processes = place.start(rank_main, place, place.method(), out)
        processes[1].join(LIMIT_SECONDS)
        for process in processes:
            process.kill()
        assert processes[1].exitcode == 0
        said = out.get(timeout=60)
    assert len(said) == 2 * len(APART)
    hosts = ["distopt-a", "distopt-b"] if ranks == "1+1" else ["", ""]
    for text in said:
        assert f"rank 0 (host {hosts[0]}" in text, said
        assert f"sent 4 float32 with tag 0, where rank 1 (host {hosts[1]}" in text, said
