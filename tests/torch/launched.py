"""One rank, started in whatever way: make a group, sum, and say so."""

import os
import sys

import torch
import torch.distributed as dist

import distopt.torch  # noqa: F401 - registers the backend

NAMES = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


def run(rank: int, size: int, method: str, backend: str = "distopt") -> None:
    # After destroy_process_group a new group can be made. That rank 0's TCP store goes first makes it a race elsewhere.
    for again in range(2 if method.startswith("file://") else 1):
        place = f"{method}{again}" if method.startswith("file://") else method
        dist.init_process_group(backend, init_method=place, rank=rank, world_size=size)
        tensor = torch.arange(5.0) + rank
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.arange(5.0) * size + sum(range(size)))
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} of {size} is done\n")


def fail(rank: int, size: int, method: str) -> None:
    dist.init_process_group("distopt", init_method=method, rank=rank, world_size=size)
    for step in range(3):
        if step == rank == 1:
            raise ValueError("the mistake of rank 1")
        dist.barrier()


def spawn(size: int, method: str, body: str = "run") -> None:
    torch.multiprocessing.spawn({"run": run, "fail": fail}[body], (size, method), nprocs=size)


def has_helper(rank: int, size: int, way: str, place: str) -> None:
    """Each rank has a process that makes a group with those of others."""
    dist.init_process_group("distopt")
    process = torch.multiprocessing.get_context(way).Process(target=help_out, args=(rank, size, place))
    process.start()
    process.join()
    dist.barrier()
    dist.destroy_process_group()


def help_out(rank: int, size: int, place: str) -> None:
    try:
        run(rank, size, place)
    except RuntimeError as error:  # of rank 0 that its port is taken
        sys.stdout.write(f"helper {rank} is refused: {error}\n")


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        spawn(int(sys.argv[2]), *sys.argv[3:])
    else:
        rank, size = next((os.environ[a], os.environ[b]) for a, b in NAMES if a in os.environ)
        body, words = (has_helper, sys.argv[2:]) if sys.argv[1] == "helper" else (run, sys.argv[1:])
        body(int(rank), int(size), *words)
