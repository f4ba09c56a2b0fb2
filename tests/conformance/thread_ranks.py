"""The oracle: a slow communicator in plain NumPy whose ranks are threads of this process.

A collective deposits a copy of its input when it is started, spoils the array that will receive the result, and looks
at what the others deposited only when it is waited for: a caller that uses a result too early, or relies on the order
in which the ranks arrive, fails.
"""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from distopt.comm.base import Communicator, RaggedWork, Work
from distopt.errors import MismatchError, StalledError
from distopt.launch.job.topology import Topology
from tests.conformance.oracle import STORAGE, reduce_in_rank_order

TIMEOUT = 30.0


@dataclass
class Board:
    """The ranks' posts for the collectives in progress, by sequence number."""

    world_size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    posts: dict[int, dict[int, tuple[tuple[object, ...], np.ndarray]]] = field(default_factory=dict)


class OracleWork(Work):
    def __init__(self, comm, sequence, finish):
        self.comm, self.sequence, self.finish = comm, sequence, finish

    def done(self):
        return self.finish is None or len(self.comm.board.posts[self.sequence]) == self.comm.topology.world_size

    def wait(self, timeout=None):
        if self.finish is None:
            return
        board, finish, self.finish = self.comm.board, self.finish, None
        with board.changed:
            posts = board.posts[self.sequence]
            if not board.changed.wait_for(lambda: len(posts) == board.world_size, timeout or TIMEOUT):
                raise StalledError(f"only ranks {sorted(posts)} came to collective {self.sequence}")
        calls = {call for call, _ in posts.values()}
        if len(calls) > 1:
            raise MismatchError(f"collective {self.sequence}: {calls}")
        finish([posts[rank][1] for rank in range(board.world_size)])


class OracleCommunicator(Communicator):
    name = "oracle"

    def __init__(self, rank, board):
        self.topology = Topology.of_one_host(rank, board.world_size, "host")
        self.board = board
        self.sequence = 0

    def _empty(self, count, dtype, xp):
        return np.full(count, 77, STORAGE[dtype])

    def barrier(self):
        self._post("barrier", np.zeros(0), None, lambda _: None).wait()

    def close(self):
        pass

    def _post(self, call, array, out, finish):
        sequence, self.sequence = self.sequence, self.sequence + 1
        with self.board.changed:
            self.board.posts.setdefault(sequence, {})[self.topology.rank] = (call, array.copy())
            self.board.changed.notify_all()
        if out is not None:
            out[...] = 99
        return OracleWork(self, sequence, finish)

    def _start(self, request, array, out):
        kind, dtype, _, op, root = request[:5]

        def finish(arrays):
            if kind == "all_gather":
                out[...] = np.concatenate(arrays)
            elif kind == "broadcast":
                out[...] = arrays[root]
            else:
                result = reduce_in_rank_order(arrays, dtype, op)
                out[...] = result if kind == "all_reduce" else np.split(result, len(arrays))[self.topology.rank]

        return self._post((kind, dtype, op, root, array.shape), array, out, finish)

    def _start_ragged(self, request, parts):
        got, ends = [], np.cumsum([part.size for part in parts])
        deposit = np.concatenate([ends.view(np.uint8), np.concatenate(parts).view(np.uint8)])

        def finish(arrays):
            for array in arrays:
                cuts, row = array[: ends.nbytes].view(ends.dtype), array[ends.nbytes :].view(parts[0].dtype)
                whole = np.split(row, cuts[:-1])
                got.append(whole[self.topology.rank if len(whole) > 1 else 0].copy())

        return RaggedWork(self._post((request.kind, request.dtype), deposit, None, finish), got)


class SplittingCommunicator(OracleCommunicator):
    """As if the transport could send each rank only its part."""

    sends_parts = True


def on_ranks(world_size, body, *, cls=OracleCommunicator):
    """Call `body(comm)` on every rank; the results in rank order. An error on any rank is raised."""
    board = Board(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(body, cls(rank, board)) for rank in range(world_size)]
        return [future.result() for future in futures]


def with_ranks(world_size, cls=OracleCommunicator):
    """Make a test of what each of so many ranks does, given its communicator and the parameters of the test."""

    def as_test(body):
        def test(**given):
            on_ranks(world_size, lambda comm: body(comm, **given), cls=cls)

        _, *parameters = inspect.signature(body).parameters.values()
        vars(test).update(__signature__=inspect.Signature(parameters))
        return test

    return as_test


def same_bits(a, b):
    """Whether two sequences hold the same float32 arrays."""
    return all(np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(a, b, strict=True))
