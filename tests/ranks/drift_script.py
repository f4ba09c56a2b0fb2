"""A rank of mpiexec: the function and the case, of `test_drift`, that its arguments name. It ends in an error."""

import functools
import sys

import distopt
from distopt import opt
from tests.ranks import test_drift
from tests.ranks.small_net import SMALL

if __name__ == "__main__":
    world = distopt.init()
    create = functools.partial(opt.DistOpt, bucket_elements=SMALL, partition_elements=SMALL)
    getattr(test_drift, sys.argv[1])(create, world.rank == world.world_size - 1, *sys.argv[2:])
