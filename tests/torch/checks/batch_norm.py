"""SyncBatchNorm against one process that has all batches."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import distopt.torch

from .ddp import learn
from .ranks import Ranks, same_on_all_ranks, with_error


def normalized(dtype: torch.dtype) -> torch.nn.Module:
    """A network with batch normalization of every kind."""
    torch.manual_seed(5)
    layers = (
        *(torch.nn.BatchNorm2d(3, momentum=None), torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()),
        *(torch.nn.Conv2d(4, 5, 2), torch.nn.BatchNorm2d(5, affine=False), torch.nn.Flatten(), torch.nn.Linear(45, 6)),
        *(torch.nn.BatchNorm1d(6, track_running_stats=False), torch.nn.Linear(6, 3)),
    )
    return torch.nn.Sequential(torch.nn.Sequential(*layers[:4]), *layers[4:]).to(dtype)


def batch_of(ranks: range, step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The batches of these ranks, one after the other, of different sizes; means are large beside deviations."""
    generators = [(q, torch.Generator().manual_seed(100 * step + q)) for q in ranks]
    x = [torch.randn(3 + 2 * q, 3, 6, 6, generator=g, dtype=torch.float64) * 0.5 + 3 + q for q, g in generators]
    return torch.cat(x).to(dtype), torch.cat([torch.randint(3, (3 + 2 * q,), generator=g) for q, g in generators])


def check_sync_batch_norm(r: Ranks) -> None:
    """DDP gives the results of one process that has the batches of all ranks."""
    cross_entropy, own = torch.nn.functional.cross_entropy, range(r.rank, r.rank + 1)
    weight = len(batch_of(own, 0, torch.float32)[0]) * r.size / len(batch_of(range(r.size), 0, torch.float32)[0])
    for dtype, group, memory in (
        (torch.float64, None, torch.contiguous_format),
        (torch.float32, None, torch.channels_last),
        (torch.float32, r.gloo, torch.contiguous_format),
    ):
        model, whole = normalized(dtype).to(memory_format=memory), normalized(dtype)
        keys = [*model.state_dict()]
        model = distopt.torch.SyncBatchNorm.convert_sync_batchnorm(model, group)
        assert [*model.state_dict()] == keys
        assert sum(isinstance(layer, distopt.torch.SyncBatchNorm) for layer in model.modules()) == 4
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0005, broadcast_buffers=False)
        first, second = (torch.optim.SGD(net.parameters(), 0.05, momentum=0.5) for net in (model, whole))
        for step in range(5):
            x, y = batch_of(own, step, dtype)
            first.zero_grad()
            (cross_entropy(ddp(x.to(memory_format=memory)), y) * weight).backward()
            first.step()
            learn(whole, second, batch_of(range(r.size), step, dtype))
        tolerance = 1e-10 if dtype == torch.float64 else 1e-3
        for (name, found), expected in zip(model.state_dict().items(), whole.state_dict().values(), strict=True):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
            same_on_all_ranks(found, name)
        if r.rank == 0:  # evaluation is local; the last normalization has no running statistics
            x, _ = batch_of(own, 9, dtype)
            torch.testing.assert_close(model.eval()(x), whole.eval()(x), rtol=10 * tolerance, atol=10 * tolerance)


def check_sync_batch_norm_of_an_empty_batch(r: Ranks) -> None:
    """All ranks but the last have an empty batch; statistics and gradients are as if the last were alone."""
    whole = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layer, local = (kind(3, dtype=torch.float64) for kind in (distopt.torch.SyncBatchNorm, torch.nn.BatchNorm1d))
    x = (whole if r.rank == r.size - 1 else whole[:0]).clone().requires_grad_()
    alone = whole.clone().requires_grad_()
    for each, input_ in ((layer, x), (local, alone)):
        each(input_).pow(3).sum().backward()
    dist.all_reduce(layer.weight.grad)
    torch.testing.assert_close(layer.weight.grad, local.weight.grad)
    torch.testing.assert_close(layer.running_var, local.running_var)
    torch.testing.assert_close(x.grad, alone.grad[: len(x)])


def check_sync_batch_norm_of_16_bits(r: Ranks) -> None:
    x = (torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(r.rank)) + r.rank).bfloat16().requires_grad_()
    layer = distopt.torch.SyncBatchNorm(3)
    y = layer(x)
    assert y.dtype == torch.bfloat16
    y.square().sum().backward()
    parts = [torch.empty_like(x) for _ in r.all]
    dist.all_gather(parts, x.detach())
    whole = torch.nn.functional.batch_norm(torch.cat(parts).float(), None, None, training=True)
    torch.testing.assert_close(y.float(), whole[4 * r.rank :][:4], rtol=2e-2, atol=2e-2)
    assert torch.isfinite(x.grad).all()
    with_error(ValueError, r"expected an input \[N, 3, ...\], got \[4, 2\]", layer, torch.zeros(4, 2))
