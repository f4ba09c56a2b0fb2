"""An MPI script whose last rank forks a child, which ends as the argument says; the ranks go on and end well."""

import os
import sys
import warnings

from distopt import launch
from distopt.comm import create

warnings.simplefilter("ignore", DeprecationWarning)  # of forks of processes with threads
how = sys.argv[1]
job = launch.join()
communicator = create(job, "mpi")
communicator.barrier()
child = os.fork() if job.topology.rank == job.topology.world_size - 1 else None
if child == 0:
    if how == "raise":
        raise ValueError("of the child")
    sys.exit(3 if how == "sys.exit" else 0)
if child:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.stderr.write(f"the child ended with {code}\n")
for _ in range(3):
    communicator.barrier()
communicator.close()
sys.stdout.write(f"rank {job.topology.rank} has ended well\n")
