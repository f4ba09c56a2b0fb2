"""Ranks on several hosts, told by MPI, or by the second argument: "abab" puts ranks 0 and 2 on one host.

The first argument says what they do.
"""

import hashlib
import logging
import os
import sys
import time

import numpy as np
from mpi4py import MPI

from distopt import _core
from distopt.comm import Communicator, create
from distopt.errors import CommunicatorError
from distopt.launch.job.mpi import MpiJob

# Through one exchange, flat, by hosts, with a rest, and in several parts.
COUNTS = (5, 1001, 8193, 100_003, 4_500_001)


def check(comm: Communicator) -> str:
    """A digest of all results, once they are known to be NumPy's but for rounding."""
    digest = hashlib.sha256()
    for count in COUNTS:
        sent = [np.random.default_rng([q, count]).random(count, np.float32) for q in range(comm.topology.world_size)]
        wire = comm.empty(count)
        for op, of in (("sum", np.sum), ("mean", np.mean), ("max", np.max)) * 2:
            wire[:] = sent[comm.topology.rank]
            comm.all_reduce(wire, op, label=f"wire {count}").wait()
            np.testing.assert_allclose(wire, of(sent, axis=0), rtol=1e-6)
            digest.update(wire)
    return digest.hexdigest()


def main() -> None:
    how, hosts = sys.argv[1], sys.argv[2:]
    _core.set_leak_warnings(True)
    logging.basicConfig(level=logging.INFO)
    job = MpiJob(host=f"host-{hosts[0][MPI.COMM_WORLD.rank]}" if hosts else None)
    rank, last = job.topology.rank, job.topology.world_size - 1
    comm = create(job)
    wire = comm.empty(100_000)
    wire[:] = 1
    comm.all_reduce(wire).wait()
    said = ""
    if how == "check":
        said = check(comm)
    else:
        try:
            if how == "op":
                wire, other = comm.empty(2_000_000), comm.empty(2_000_000)  # both are under way at the mismatch
                works = [comm.all_reduce(wire), comm.all_reduce(other, "max" if rank == last else "sum")]
                for work in reversed(works):
                    work.wait()
            elif rank != last:
                comm.all_reduce(wire, label="bucket 3").wait()
            elif how == "mismatch":
                comm.all_reduce(wire[1:], label="bucket 3").wait()
            elif how == "close":
                comm.close()
            elif how == "late":
                time.sleep(2 * float(os.environ["DISTOPT_TIMEOUT"]))
        except CommunicatorError as error:
            said = f"{type(error).__name__} {error}"
        job.comm.Barrier()
    sys.stdout.write(f"rank {rank} on {job.topology.host} over {comm.name}: {said}\n")
    sys.stdout.flush()
    comm.close()
    job.close()


main()
