"""Codecs of PyTorch's front on a GPU, over NCCL and via the host, against the same training on CPUs."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from distopt.comm.gpu import GpuStack
from tests.conformance.ranks import LocalJob, join_gloo, run_ranks_ok

from .test_nccl import SHARING, SHARING_VERSION

torch = pytest.importorskip("torch")

from tests.torch.checks.codecs import CODECS, params_of, sgd  # noqa: E402

FRONTS = [f"{front}{where}" for where in ("", " via host") for front in ("hook", "DistOpt", "DiLoCo")]
SMALL = 2_000  # elements of a bucket: the network has several


def network(device: str) -> Any:
    torch.manual_seed(7)
    layers = torch.nn.Linear(40, 71), torch.nn.ReLU(), torch.nn.Linear(71, 33), torch.nn.ReLU(), torch.nn.Linear(33, 10)
    return torch.nn.Sequential(*layers).to(device)


def batches(rank: int, device: str) -> Iterator[tuple[Any, Any]]:
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(16, 40, generator=generator), torch.randint(10, (16,), generator=generator)
        yield x.to(device), y.to(device)


def trained(front: str, codec: str, device: str, rank: int) -> list[Any]:
    """The parameters after some steps, on the CPU."""
    import distopt.torch
    from distopt import codecs

    model, made = network(device), codecs.create(codec, **CODECS[codec])
    front, _, where = front.partition(" via ")
    options = {"bucket_elements": SMALL, "via_host": bool(where)}
    optimizer = sgd(model)
    trains, steps = model, optimizer
    if front == "hook":
        trains = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.005)
        trains.register_comm_hook(*distopt.torch.hook(model, made, **options))
    elif front == "DistOpt":
        steps = distopt.torch.DistOpt(optimizer, model.named_parameters(), codec=made, **options)
    else:
        outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.5, nesterov=True)
        distopt.torch.DiLoCo(model, optimizer, outer, sync_every=2, codec=made, **options)
    for x, y in batches(rank, device):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(trains(x), y).backward()
        steps.step()
    return [param.cpu() for param in params_of(model)]


def compare(front: str, rank: int, **tolerances: float) -> list[Any]:
    """Collective. The parameters that each codec has ended with: on the GPU as on the CPU, whatever the stream."""
    ended = []
    for codec in CODECS:
        expected = trained(front, codec, "cpu", rank)
        found = trained(front, codec, "cuda", rank)
        with torch.cuda.stream(torch.cuda.Stream()):
            on_another_stream = trained(front, codec, "cuda", rank)
        for theirs, one, two in zip(expected, found, on_another_stream, strict=True):
            assert torch.allclose(one, theirs, **tolerances), (codec, (one - theirs).abs().max())
            assert torch.equal(one, two), codec
        ended += found
    return ended


def train(job: LocalJob, share: bool, front: str) -> list[Any]:
    import torch.distributed as dist

    os.environ.update(SHARING if share else {})
    join_gloo(job)
    # An element near the smallest that is sent may be sent on one device alone.
    ended = compare(front, job.topology.rank, rtol=1e-3, atol=2e-3)
    dist.destroy_process_group()
    return [param.numpy() for param in ended]


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_codecs_on_a_gpu(stack: GpuStack, ranks: int, front: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    if ranks > 1 and "host" not in front and stack.nccl_version < SHARING_VERSION:
        pytest.skip(f"two ranks on one GPU need NCCL 2.30; this is {stack.nccl_version}")
    first, *others = run_ranks_ok(train, ranks, ranks > 1, front)
    for other in others:
        assert all((a == b).all() for a, b in zip(first, other, strict=True))
