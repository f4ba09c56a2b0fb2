"""A rank under any launcher. The first argument says what it does; it prints one line with what it saw.

A number: `launch.main` is asked for as many ranks, each of which joins with the ticket of its own process. A second
argument, "MPI", has the script load MPI by itself before it joins.
"""

import os
import signal
import sys
import time

if sys.argv[2:] == ["MPI"]:
    import mpi4py

    mpi4py.rc(initialize=False, finalize=False)  # no mpiexec has started it
    from mpi4py import MPI  # noqa: F401 - MPICH's wheel brings a UCX of its own

import numpy as np

from distopt import comm, launch


def main(how: str) -> None:
    job = launch.join()
    world = comm.create(job)
    rank, size = job.topology.rank, job.topology.world_size
    for wire in (np.arange(500_003.0), np.arange(1001, dtype=np.float32)):  # MPI would read the first by another way
        expected = wire * (size * (size + 1) / 2)
        wire *= rank + 1
        world.all_reduce(wire).wait()
        np.testing.assert_array_equal(wire, expected)
    place = f"{job.topology.local_rank} of {job.topology.local_size} on {job.topology.host}"
    mpi = "mpi4py.MPI" in sys.modules
    sys.stdout.write(f"rank {rank} of {size}, {place}: {type(job).__name__} {world.name} mpi={mpi}\n")
    sys.stdout.flush()
    last = rank == size - 1
    if how == "SIGKILL once":
        world.barrier()  # all have written their lines
    if how == "SIGKILL" or (how == "SIGKILL once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"):
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    elif how == "stay":
        time.sleep(1000)
    elif how == "raise":
        if last:
            raise ValueError("the cause")
        world.all_reduce(wire).wait()
    world.close()
    job.close()
    if how == "outlive" and last:
        time.sleep(1.0)
        sys.stdout.write("done\n")


def by_ticket(rank: int, world_size: int, ticket: launch.Ticket) -> None:
    job, wire = launch.join(ticket, rank, world_size), np.full(3, rank + 1, np.float32)
    with comm.create(job) as world:
        world.all_reduce(wire).wait()
        sys.stdout.write(f"rank {rank} of {world_size}: sum {wire[0]:g}\n")
    job.close()


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        launch.main(by_ticket, int(sys.argv[1]), (launch.Ticket(),))
    else:
        launch.main(main, args=(sys.argv[1],))
