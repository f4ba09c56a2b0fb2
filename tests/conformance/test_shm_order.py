"""In shared memory: an operation on what an unfinished one still reads."""

import numpy as np
import pytest

from .ranks import LocalJob, connect, with_ranks

COUNT = 20_006


def start(comm, kind, array):
    """An operation that reads `array`; its work, what returns the result, and the result in NumPy."""
    rank = comm.topology.rank
    both = [np.arange(COUNT, dtype=np.float32) + 1000 * q for q in range(2)]
    if kind == "all_gather":
        out = np.zeros(2 * COUNT, np.float32)
        return comm.all_gather(array, out), lambda _: out, np.concatenate(both)
    if kind == "all_gather_ragged":
        return comm.all_gather_ragged(array), lambda work: np.concatenate(work.parts), np.concatenate(both)
    out = np.zeros(COUNT // 2, np.float32)
    return comm.reduce_scatter(array, out), lambda _: out, np.split(both[0] + both[1], 2)[rank]


@pytest.mark.parametrize("kind", ["all_gather", "all_gather_ragged", "reduce_scatter"])
@with_ranks(2)
def test_peers_do_not_reduce_an_array_that_this_rank_still_reads(job: LocalJob, kind: str) -> None:
    """Rank 0 has sent its array and starts to reduce it; rank 1 is through with both before rank 0 reads it again."""
    rank = job.topology.rank
    comm = connect(job)
    wire = comm.empty(COUNT, "float32")
    wire[:] = np.arange(COUNT) + 1000 * rank
    array = wire if rank == 0 else wire.copy()  # ordinary memory on one rank: the array is read in chunks
    if rank == 0:
        job.all_gather(b"rank 1 has started to read")
    first, result, expected = start(comm, kind, array)
    if rank == 1:
        job.all_gather(b"rank 1 has started to read")
        job.all_gather(b"rank 0 has started both")
    second = comm.all_reduce(wire[: COUNT // 2])
    if rank == 0:
        job.all_gather(b"rank 0 has started both")
    job.all_gather(b"rank 1 has gone as far as it can")
    first.wait()
    second.wait()
    np.testing.assert_array_equal(result(first), expected)
    np.testing.assert_array_equal(wire[: COUNT // 2], 2 * np.arange(COUNT // 2) + 1000)
    comm.close()
