"""horovodrun with Gloo, which numbers the ranks and does not connect them. With MPI it calls mpiexec, which decides."""

from __future__ import annotations

from .base import Launcher


class Horovodrun(Launcher):
    """horovodrun, by the variables that it sets for each rank."""

    name = "horovodrun"
    rank, size = "HOROVOD_RANK", "HOROVOD_SIZE"
    local_rank, local_size = "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
    prefixes = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_", "HOROVOD_GLOO_")
    may_start_launchers = True
    address = "HOROVOD_GLOO_RENDEZVOUS_ADDR"  # of horovodrun itself, which is to run on the host of rank 0
    job_variables = (address, "HOROVOD_GLOO_RENDEZVOUS_PORT")
