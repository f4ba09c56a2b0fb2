"""An MPI script whose last rank ends as the first argument says, while the others wait for it."""

import os
import signal
import sys
import time

from distopt import launch
from distopt.comm import create

job = launch.join()
communicator = create(job, *sys.argv[2:] or ["mpi"])
communicator.barrier()
sys.stdout.write(f"rank {job.topology.rank} of {job.topology.world_size}\n")  # one write: whole lines
sys.stdout.flush()
how = sys.argv[1]
if how != "success" and job.topology.rank == job.topology.world_size - 1:
    if how == "raise":
        raise ValueError("the cause")
    if how == "sys.exit":
        sys.exit(3)
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
        time.sleep(5)
    if how == "huge":
        raise ValueError("0123456789" * 5_000_000 + " the end of the text")
    if how == "wait":
        signal.pause()
if how == "finalize":
    try:
        if job.topology.rank == job.topology.world_size - 1:
            raise ValueError("the cause")
        communicator.barrier()
    finally:
        sys.modules["mpi4py.MPI"].Finalize()
if how in ("use", "make"):
    sys.modules["mpi4py.MPI"].Finalize()
    if how == "make":
        create(job, sys.argv[2])
communicator.barrier()
