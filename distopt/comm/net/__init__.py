"""Collectives and messages between hosts, over UCX, or over the MPI library that mpi4py has loaded."""
