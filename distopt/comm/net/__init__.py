"""Collectives and messages between hosts, over the MPI library that mpi4py has loaded."""
