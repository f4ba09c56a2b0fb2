"""Whether ranks are far from each other, measured: what is quick nearby is slow there, and the other way round."""

from __future__ import annotations

import time

import numpy as np

from ... import _core
from ...errors import LaunchError
from ...settings import Settings
from .network import Peers

_FAR_SECONDS = 2e-3  # there and back; in one building it is a tenth of that
_MEASUREMENTS = 4  # the first one waits for the connections, and a busy core delays any
_PING, _NEAR, _FAR = range(3)
_TAG = 0


def is_far(job: Peers, transport: _core.Transport, worker: _core.UcxWorker) -> bool:
    """Collective. Whether a short message from the first rank to another one, and back, takes long.

    Args:
        job: whose ranks are meant. A first rank in the middle is nearer to all than they are to each other, by half.
        transport: between the ranks of `job`; carries nothing else.
        worker: makes the connections of this process.

    Raises:
        LaunchError: a rank does not answer, or has ended.
    """
    rank, others = job.topology.rank, range(1, job.topology.world_size)
    talk = _Talk(transport, job)
    if rank != 0:
        while (said := talk.receive([0])[0]) == _PING:
            talk.send(_PING, [0])
        return said == _FAR
    nearest = dict.fromkeys(others, float("inf"))
    for _ in range(_MEASUREMENTS):
        talk.send(_PING, others)
        begin = time.perf_counter()
        talk.receive(others)
        for other, moment in talk.received.items():
            nearest[other] = min(nearest[other], moment - begin)
        if all(seconds < _FAR_SECONDS for seconds in nearest.values()):
            break
    # Where processes wait for a core, any message may take long.
    far = worker.longest_round_trip >= _FAR_SECONDS and any(each >= _FAR_SECONDS for each in nearest.values())
    talk.send(_FAR if far else _NEAR, others)
    return far


class _Talk:
    """Numbers to other ranks, and from them.

    Attributes:
        received: when the last number of each rank was received, by `time.perf_counter`.
    """

    def __init__(self, transport: _core.Transport, job: Peers) -> None:
        self._transport, self._channel, self._job = transport, _core.NetChannel(transport), job
        self._patience = Settings.from_env().timeout
        self.received: dict[int, float] = {}

    def send(self, number: int, others: range | list[int]) -> None:
        for other in others:
            self._channel.send(np.array([number], np.int64), other, _TAG)

    def receive(self, others: range | list[int]) -> list[int]:
        """One number from each of `others`."""
        numbers = {other: np.zeros(1, np.int64) for other in others}
        transfers = {other: self._channel.receive(number, other, _TAG) for other, number in numbers.items()}
        begin = time.perf_counter()
        while missing := [other for other, transfer in transfers.items() if not transfer.done]:
            self._channel.poll()
            now = time.perf_counter()
            self.received |= {other: now for other in missing if transfers[other].done}
            self._check(missing, now - begin)
            _core.pause(now - begin)
        return [int(number[0]) for number in numbers.values()]

    def _check(self, missing: list[int], waited: float) -> None:
        self._job.check_open()
        lost = [other for other in missing if other in self._transport.lost]
        if lost or waited > self._patience:
            names = ", ".join(f"rank {self._job.numbers[other]}" for other in lost or missing)
            me = f"rank {self._job.numbers[self._job.topology.rank]}"
            why = "has ended, or cannot be reached" if lost else f"has not answered for {waited:.3g} s"
            raise LaunchError(f"{me} connects to {names} over UCX, which {why}; see its output")
