"""Arrays of moderate size in many parts, over MPI."""

from distopt.comm.net.mpi import MpiCommunicator
from distopt.launch.job.base import Job


class SmallPartsCommunicator(MpiCommunicator):
    @classmethod
    def create(cls, job: Job) -> "SmallPartsCommunicator":
        return cls(job, inline_bytes=64, chunk_bytes=512)
