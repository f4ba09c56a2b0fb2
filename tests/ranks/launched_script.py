"""A rank under any launcher. The first argument says what it does; it prints one line with what it saw."""

import os
import signal
import sys
import time

import numpy as np

from distopt import comm, launch
from distopt.errors import UsageError


def main(how: str) -> None:
    if how == "usage":
        raise UsageError("the option is wrong; correct it")
    job = launch.join()
    world = comm.create(job)
    rank, size = job.topology.rank, job.topology.world_size
    wire = np.arange(1001, dtype=np.float32) * (rank + 1)
    world.all_reduce(wire).wait()
    np.testing.assert_array_equal(wire, np.arange(1001, dtype=np.float32) * (size * (size + 1) / 2))
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


if __name__ == "__main__":
    launch.main(main, args=(sys.argv[1],))
