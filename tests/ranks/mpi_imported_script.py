"""A rank under any launcher, of a script that loads MPI by itself before it joins: `launched_script`."""

import sys

import mpi4py

mpi4py.rc(initialize=False, finalize=False)  # no mpiexec has started it

from mpi4py import MPI  # noqa: E402, F401 - MPICH's wheel brings a UCX of its own

from distopt import launch  # noqa: E402
from tests.ranks.launched_script import main  # noqa: E402

if __name__ == "__main__":
    launch.main(main, args=(sys.argv[1],))
