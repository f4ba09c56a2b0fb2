"""The ranks of a process group as a job: they find each other through PyTorch's store, and exchange bytes there."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from secrets import token_bytes
from typing import ClassVar

import torch.distributed as dist

from ..errors import LaunchError, Process
from ..launch.end_together.siblings import Absence
from ..launch.job.base import Job
from ..launch.job.topology import host_identity, places_of
from ..launch.rendezvous.host_group import HostGroup
from ..settings import Settings

_log = logging.getLogger("distopt")


class StoreJob(Job):
    """The ranks that share a store of PyTorch, as a job.

    Args:
        store: of these ranks, used for nothing else.
        rank: of this process among them.
        ranks: their numbers in the script's job.
        seconds: how long an exchange waits for a rank.

    Attributes:
        known: the processes of the ranks of all groups so far, by number in the script's job, for errors.
        processes: the processes of these ranks.
        hosts: the ranks of each host, in the order of the first of them.
        mine: those of this host.
        seconds: see above.
    """

    known: ClassVar[dict[int, Process]] = {}

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], seconds: float) -> None:
        """Collective.

        Raises:
            LaunchError: a rank did not come.
        """
        self._store, self._rank, self._ranks, self.seconds = store, rank, ranks, seconds
        self._round = 0
        note = [host_identity(), socket.gethostname(), os.getpid(), token_bytes(16).hex()]
        notes = [json.loads(each) for each in self.all_gather(json.dumps(note).encode())]
        identities, hosts, pids, secrets = zip(*notes, strict=True)
        self.processes = list(map(Process, ranks, hosts, pids))
        self.known.update(zip(ranks, self.processes, strict=True))
        self.topology, self.hosts, self.mine = places_of(rank, identities, hosts)
        self._secret = bytes.fromhex(secrets[self.mine[0]])

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective. See `Job.all_gather`."""
        if len(self._ranks) == 1:
            return [payload]
        self._round += 1
        store = dist.PrefixStore(str(self._round), self._store)
        store.set(str(self._rank), payload.hex())
        keys = [str(q) for q in range(len(self._ranks))]
        warn_after = min(self.seconds, Settings.from_env().stall_warning)
        if not self._came(store, keys, warn_after):
            absent = ", ".join(self._absent(store, keys))
            _log.warning(
                "rank %d of %d waits for %s to join the group of ranks %s, for %g s at most",
                self._rank, len(self._ranks), absent, list(self._ranks), self.seconds,
            )  # fmt: skip
            if not self._came(store, keys, self.seconds - warn_after) and (names := self._absent(store, keys)):
                self.forget()
                raise LaunchError(
                    f"{', '.join(names)} did not join the group of ranks {list(self._ranks)} within {self.seconds:g} "
                    "s; every rank must make the same groups in the same order"
                )
        return [bytes.fromhex(each.decode()) for each in store.multi_get(keys)]

    @staticmethod
    def _came(store: dist.Store, keys: list[str], seconds: float) -> bool:
        """Whether all keys are there within so many seconds."""
        try:
            store.wait(keys, timedelta(seconds=max(seconds, 0.001)))  # without any, PyTorch would wait for ever
        except RuntimeError:
            return bool(store.check(keys))
        return True

    def _absent(self, store: dist.Store, keys: list[str]) -> list[str]:
        """The names of the ranks whose keys are not there."""
        absent = [rank for rank, key in zip(self._ranks, keys, strict=True) if not store.check([key])]
        return [self.known[rank].name if rank in self.known else f"rank {rank}" for rank in absent]

    def forget(self) -> None:
        """Local, when all ranks have read them. Delete this rank's payloads: a later group may use store and name."""
        for number in range(1, self._round + 1):
            dist.PrefixStore(str(number), self._store).delete_key(str(self._rank))

    def _make_host_group(self) -> HostGroup:
        local, limit = self.topology, Settings.from_env().stall_warning
        return HostGroup(self._secret, local.local_rank, local.local_size, self.seconds, Absence(limit))
