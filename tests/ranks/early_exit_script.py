"""A script whose last rank ends with code 0, in the way and at the place that the arguments say.

The others go on for as many seconds as the last one says."""

import ctypes
import os
import sys
import time

import numpy as np

import distopt

WAYS = {
    "os._exit": lambda: os._exit(0),
    "exit of C": lambda: ctypes.CDLL(None).exit(0),
    "_exit of C": lambda: ctypes.CDLL(None)._exit(0),
    "return": lambda: sys.exit(0),
}
how, where, seconds = sys.argv[1:]
world = distopt.init()
leaves = world.rank == world.world_size - 1
if leaves:
    os.write(1, b"%d\n" % os.getpid())
for step in range(5):
    total = np.full(1000 + step, world.rank + 1, np.float32)
    world.all_reduce(total)
    if leaves and step == 3 and where == "between steps":
        WAYS[how]()
if "after close" in where:
    world.close()
if "finalized" in where:
    sys.modules["mpi4py.MPI"].Finalize()
if leaves:
    WAYS[how]()
time.sleep(float(seconds))
os.write(1, b"done\n")
