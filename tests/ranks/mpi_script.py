"""An MPI script whose last rank ends as the first argument says, while the others wait for it."""

import os
import signal
import sys

from distopt import launch
from distopt.comm import create

job = launch.join()
communicator = create(job, "mpi")
communicator.barrier()
sys.stdout.write(f"rank {job.topology.rank} of {job.topology.world_size}\n")  # one write: whole lines
sys.stdout.flush()
how = sys.argv[1]
if how != "success" and job.topology.rank == job.topology.world_size - 1:
    if how == "raise":
        raise ValueError("the cause")
    if how == "sys.exit":
        sys.exit(3)
    if how == "SystemExit":
        raise SystemExit(3)
    if how == "return":
        sys.exit()
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "wait":
        signal.pause()
communicator.barrier()
