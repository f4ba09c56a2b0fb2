"""Ranks of one host that believe to be on several. Start them with mpiexec."""

from mpi4py import MPI

from distopt.launch.job.mpi import MpiJob


def blocks() -> MpiJob:
    """Two neighbours on every host."""
    return MpiJob(host=f"host{MPI.COMM_WORLD.rank // 2}")


def round_robin() -> MpiJob:
    """Neighbours on different hosts."""
    return MpiJob(host=f"host{MPI.COMM_WORLD.rank % 2}")
