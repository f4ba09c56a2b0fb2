"""Two ranks share memory and say so in files of their own, whatever has become of their streams.

Arguments: number of ranks to start (0: a launcher has), folder of the files, and "fail" for a last rank that raises.
"""

import sys
from pathlib import Path

import numpy as np

import distopt
from distopt import launch


def train(*_) -> None:
    world = distopt.init()
    total = world.all_reduce(np.arange(5.0) + world.rank)
    Path(sys.argv[2], str(world.rank)).write_text(str(total.tolist()))
    sys.stdout.write(f"a line of rank {world.rank}\n")  # one write: whole lines
    sys.stderr.write("a line of stderr\n")
    world.all_reduce(np.zeros(3))
    if "fail" in sys.argv and world.rank == world.world_size - 1:
        raise ValueError("the cause")


if __name__ == "__main__":
    launch.main(train, int(sys.argv[1]) or None)
