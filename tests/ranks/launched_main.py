"""Asks `launch.main` for as many ranks as the first argument says; each joins with the ticket of its own process."""

import sys

import numpy as np

from distopt import comm, launch


def rank_main(rank: int, world_size: int, ticket: launch.Ticket) -> None:
    job = launch.join(ticket, rank, world_size)
    world = comm.create(job)
    wire = np.full(3, rank + 1, np.float32)
    world.all_reduce(wire).wait()
    sys.stdout.write(f"rank {rank} of {world_size}: sum {wire[0]:g}\n")
    world.close()
    job.close()


if __name__ == "__main__":
    launch.main(rank_main, int(sys.argv[1]), (launch.Ticket(),))
