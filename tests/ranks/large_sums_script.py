"""A rank under any launcher: sums of a few bytes, and of so many that MPI would read them from the other's memory."""

import sys

import numpy as np

from distopt import comm, launch


def main() -> None:
    job = launch.join()
    world = comm.create(job)
    rank, size = job.topology.rank, job.topology.world_size
    for count in (1001, 500_003):
        array = np.arange(count, dtype=np.float64) * (rank + 1)
        world.all_reduce(array).wait()
        np.testing.assert_array_equal(array, np.arange(count) * (size * (size + 1) / 2))
    sys.stdout.write(f"rank {rank} of {size}: {world.name}\n")
    sys.stdout.flush()
    world.close()
    job.close()


if __name__ == "__main__":
    launch.main(main)
