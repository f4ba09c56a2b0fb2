"""FSDP, DTensor and torch.distributed.checkpoint over distopt."""

from functools import partial
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from .ddp import drawn, network
from .ranks import Ranks, same, values


def check_fsdp(r: Ranks) -> None:
    from torch.distributed.fsdp import fully_shard

    results = []
    for group in (r.group(), r.gloo):
        mesh = dist.DeviceMesh.from_group(group, "cpu")
        model = network()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        generator = torch.Generator().manual_seed(r.rank)
        for _ in range(4):
            x, y = drawn(generator)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.full_tensor().detach() for parameter in model.parameters()])
    torch.testing.assert_close(*results)


def check_fsdp_of_16_bits(r: Ranks) -> None:
    """FSDP1 frees and refills the storages of parameters in each pass; results are as over Gloo."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    bits16 = MixedPrecision(param_dtype=torch.bfloat16)
    for options in (
        {"mixed_precision": bits16},
        {"mixed_precision": bits16, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"mixed_precision": MixedPrecision(torch.bfloat16, torch.bfloat16), "use_orig_params": True},
    ):
        results = []
        for group in (dist.group.WORLD, r.gloo):
            torch.manual_seed(3)
            wrap = partial(FullyShardedDataParallel, process_group=group, device_id=torch.device("cpu"), **options)
            layers = wrap(torch.nn.Linear(30, 200)), torch.nn.ReLU(), wrap(torch.nn.Linear(200, 10))
            model = wrap(torch.nn.Sequential(*layers))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            generator = torch.Generator().manual_seed(r.rank)
            for _ in range(4):
                x, y = torch.randn(4, 30, generator=generator), torch.randint(10, (4,), generator=generator)
                torch.nn.functional.cross_entropy(model(x).float(), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            with FullyShardedDataParallel.summon_full_params(model):
                results.append([parameter.detach().clone() for parameter in model.parameters()])
        torch.testing.assert_close(*results, rtol=1e-2, atol=1e-3)


def check_dtensor(r: Ranks) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (r.size,))
    whole = values(1, torch.float32, (2 * r.size, 3 * r.size))
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    same(rows.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local(), whole)
    same((rows @ rows.t()).full_tensor(), whole @ whole.t())
    partial = dist.tensor.DTensor.from_local(whole, mesh, [Partial()])
    same(partial.redistribute(mesh, [Shard(0)]).full_tensor(), whole * r.size)


def check_checkpoint(r: Ranks) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    folder = [TemporaryDirectory() if r.rank == 0 else None]
    path = [folder[0].name if folder[0] else None]
    dist.broadcast_object_list(path, 0)
    mesh = dist.init_device_mesh("cpu", (r.size,))
    whole = values(1, torch.float32, (2 * r.size, 3))
    dcp.save({"x": distribute_tensor(whole, mesh, [Shard(0)]), "step": 7}, checkpoint_id=path[0])
    state = {"x": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)]), "step": 0}
    dcp.load(state, checkpoint_id=path[0])
    same(state["x"].full_tensor(), whole)
    assert state["step"] == 7
    dist.barrier()
