"""The ranks that share a store of PyTorch as a job, which NCCL's communicator is made from."""

from __future__ import annotations

import numpy as np
import pytest

from distopt.comm.shm import ShmCommunicator
from distopt.errors import LaunchError, UsageError
from tests.conformance.ranks import LocalJob, with_ranks
from tests.unit.refusals import refused
from tests.unit.test_key_value import gathers

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from distopt.torch import store_job
from distopt.torch.store_job import StoreClient, StoreJob
from distopt.torch.training.parameters import TrainedParameter, device_of


def store_of(job: LocalJob) -> dist.Store:
    served = None
    if job.topology.rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = int(job.all_gather(str(served.port if served else 0).encode())[0])
    return served or dist.TCPStore("127.0.0.1", port)


@with_ranks(3)
def test_ranks_exchange_bytes_and_share_memory(job: LocalJob) -> None:
    rank, store = job.topology.rank, store_of(job)
    own = StoreJob(store, rank, range(3), 120.0)
    assert own.topology == job.topology
    for length in (0, 7):
        payloads = [bytes([q, 255, 0]) * length * q for q in range(3)]
        assert own.all_gather(payloads[rank]) == payloads
    with ShmCommunicator(own.host_group(), own.topology) as comm:
        comm.all_reduce(array := np.arange(5.0) * (rank + 1)).wait()
        np.testing.assert_array_equal(array, np.arange(5.0) * 6)
    own.close()
    client = StoreClient(dist.PrefixStore("client", store), rank, range(3), 120.0)
    assert gathers(client, 3) == "well"
    job.all_gather(b"")  # all have read
    client.forget()
    job.all_gather(b"")  # rank 0 serves the store until all have ended


@with_ranks(2)
def test_a_rank_that_does_not_come_is_named(job: LocalJob) -> None:
    store = store_of(job)
    if job.topology.rank == 0:
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DISTOPT_STALL_WARNING", "0.1")
            patch.setattr(store_job._log, "warning", lambda text, *args: said.append(text % args))
            with pytest.raises(LaunchError, match="rank 5 did not join"):
                StoreJob(store, 0, [4, 5], 0.5)
        assert said == ["rank 4 waits for rank 5 to join the group of ranks [4, 5], for 0.5 s at most"]
    job.all_gather(b"")


def test_parameters_on_other_devices_are_refused() -> None:
    on_meta = torch.nn.Parameter(torch.empty(3, device="meta"))
    text = "fc is on meta; codecs reduce gradients on CPUs and NVIDIA's GPUs"
    refused(UsageError, text, TrainedParameter, "fc", on_meta)
    one, two = (TrainedParameter(name, torch.nn.Parameter(torch.empty(3))) for name in ("a", "b"))
    assert device_of([one, two]) == torch.device("cpu")
    two.tensor = on_meta
    refused(UsageError, "parameter b is on meta, and a on cpu", device_of, [one, two])
