"""Scripts that import neither `distopt` nor `distopt.torch`; each says what it has found."""

import os
import sys
import time

import torch
import torch.distributed as dist


def say(*words: object) -> None:
    """In one piece: under torchrun the pieces of two ranks' lines mix."""
    sys.stdout.write(f"{' '.join(map(str, words))}\n")


def imported() -> None:
    """What `import torch` has imported of the package."""
    say("modules", sorted(name for name in sys.modules if name.split(".")[0] == "distopt"))


def groups() -> None:
    """Groups by the name "gloo", of a mesh, by default, and one for tensors of another device."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.arange(5.0) * 0.1 + rank
    dist.all_reduce(total)
    found: list[list[int]] = [[], []]
    dist.all_gather_object(found, [rank] * (rank + 1))
    dist.monitored_barrier()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,)).get_group()
    other = dist.new_group(backend="cuda:gloo")
    names = [type(group).__name__ for group in (dist.group.WORLD, mesh, dist.new_group(), other)]
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    say("group", rank, dist.get_backend(), repr(dist.group.WORLD), names, total.tolist(), found, timeout)
    time.sleep(1.0 * (rank == 0))  # it serves the store, where the other one looks for the next group meanwhile
    dist.destroy_process_group()


def mixed() -> None:
    """A group with another backend for another device, and another group after it."""
    import torch.testing._internal.distributed.fake_pg

    dist.init_process_group("cpu:gloo,cuda:fake")
    rank = dist.get_rank()
    total = torch.arange(5.0) * (rank + 1)
    dist.all_reduce(total)
    if torch.__version__ >= (2, 14):  # earlier ones take the name "gloo" alone
        dist.monitored_barrier()
    layer = torch.nn.Linear(2, 1, bias=False)
    ddp = torch.nn.parallel.DistributedDataParallel(layer)
    ddp(torch.full((1, 2), rank + 1.0)).sum().backward()
    devices = [str(dist.group.WORLD._get_backend(torch.device(name))) for name in ("cpu", "cuda")]
    group = dist.new_group()
    dist.all_reduce(torch.zeros(1), group=group)  # Gloo's ranks, which these may be, must not leave before all have met
    other = group._get_backend(torch.device("cpu"))
    say("mixed", rank, dist.get_backend(), devices, other, total.tolist(), layer.weight.grad.tolist())
    dist.destroy_process_group()


def by_default() -> None:
    """The group that is made where no backend is named."""
    dist.init_process_group()
    say("default", dist.get_rank(), type(dist.group.WORLD).__name__)
    dist.destroy_process_group()


def port() -> None:
    """Another server at the port of a group that has ended."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True)
    say("serves", store.port)


def spawned(rank: int, method: str) -> None:
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    say(f"spawned {rank} {type(dist.group.WORLD).__name__} {total.item()}")
    dist.destroy_process_group()


def alone() -> None:
    """A group of one rank by the name "distopt"."""
    try:
        dist.init_process_group("distopt", store=dist.HashStore(), rank=0, world_size=1)
    except Exception as error:
        say("error", type(error).__name__, error)
    else:
        say("group", dist.group.WORLD)


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        torch.multiprocessing.spawn(spawned, (sys.argv[2],), nprocs=2)
    else:
        scenarios = {each.__name__: each for each in (imported, groups, mixed, by_default, port, alone)}
        for name in sys.argv[1:]:
            scenarios[name]()
