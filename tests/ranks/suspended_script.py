"""Rank 0 waits for rank 1, which takes its time, in many small parts: a suspension in the middle ends one of them.

Arguments: number of ranks to start (0: a launcher has), and where rank 1 is late: "join" or "collective".
"""

import os
import sys
import time

import numpy as np

from distopt import launch
from distopt.comm import create


def be_late() -> None:
    sys.stdout.write(f"{os.getpid()} is late\n")
    sys.stdout.flush()
    for _ in range(30):
        time.sleep(0.03)


def work(rank: int, *_) -> None:
    if rank == 1 and sys.argv[2] == "join":
        be_late()
    with create(launch.join(), "shm") as communicator:
        communicator.barrier()
        if rank == 1 and sys.argv[2] == "collective":
            be_late()
        array = np.arange(5.0) + rank
        communicator.all_reduce(array).wait()
        sys.stdout.write(f"{array.tolist()}\n")


if __name__ == "__main__":
    if sys.argv[1] == "0":
        from distopt.launch.rendezvous.mpi import start_mpi

        work(start_mpi().COMM_WORLD.rank)
    else:
        launch.main(work, int(sys.argv[1]))
