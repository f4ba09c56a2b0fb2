"""A script whose last rank forks a child that ends as the second argument says; the ranks continue and succeed.

The first argument: number of ranks to start; 0: mpiexec has, and their transport is MPI.
"""

import os
import sys
import warnings

from distopt import launch
from distopt.comm import create

warnings.simplefilter("ignore", DeprecationWarning)  # of forks of processes with threads


def work(*_) -> None:
    job = launch.join()
    communicator = create(job, "shm" if int(sys.argv[1]) else "mpi")
    communicator.barrier()
    child = os.fork() if job.topology.rank == job.topology.world_size - 1 else None
    if child == 0:
        if sys.argv[2] == "raise":
            raise ValueError("of the child")
        if sys.argv[2] == "sys.exit":
            sys.exit(3)
        return
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stderr.write(f"the child ended with {code}\n")
    for _ in range(3):
        communicator.barrier()
    communicator.close()
    sys.stdout.write(f"rank {job.topology.rank} has ended well\n")


if __name__ == "__main__":
    launch.main(work, int(sys.argv[1])) if int(sys.argv[1]) else work()
