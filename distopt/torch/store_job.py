"""The ranks of a process group as a job: they find each other and exchange bytes through PyTorch's store."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from secrets import token_bytes
from typing import ClassVar

import torch.distributed as dist

from ..errors import LaunchError, Process
from ..launch.end_together.siblings import Absence
from ..launch.job.base import Job
from ..launch.job.topology import host_identity, places_of
from ..launch.keys import Missing, Wanted
from ..launch.rendezvous.host_group import HostGroup
from ..launch.rendezvous.key_value import KeyValueClient
from ..settings import Settings

_log = logging.getLogger("distopt")


class StoreClient(KeyValueClient):
    """The values in a store of PyTorch, which does not notice ranks that end.

    Args:
        store: used for nothing else.
        rank: see `KeyValueClient`.
        ranks: see `KeyValueClient`.
        seconds: see `KeyValueClient`.

    Attributes:
        known: the processes of ranks, by number, for errors.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], seconds: float) -> None:
        super().__init__(rank, ranks, seconds)
        self._store = store
        self.known: dict[int, Process] = {}

    def forget(self) -> None:
        """Local, when all ranks have read them. Delete this rank's payloads: a later group may use store and name."""
        for number in range(max(1, self.rounds - 1), self.rounds + 1):
            self.delete(f"{number}/{self.rank}")

    def _exchange(self, deleted: str, key: str, value: bytes, wanted: Wanted | None) -> list[bytes]:
        if deleted:
            self._store.delete_key(deleted)
        if key:
            self._store.set(key, value.hex())
        if wanted is None:
            return []
        owners = wanted.owners()
        warn_after = min(self.seconds, Settings.from_env().stall_warning)
        if not self._came(owners, warn_after):
            _log.warning(
                "rank %d waits for %s to join the group of ranks %s, for %g s at most",
                self.rank, self._known(self._absent(owners)), list(self.ranks), self.seconds,
            )  # fmt: skip
            if not self._came(owners, self.seconds - warn_after) and (absent := self._absent(owners)):
                self.forget()
                raise self._error(list(map(Missing, absent)), wanted)
        return [bytes.fromhex(each.decode()) for each in self._store.multi_get(list(owners))]

    def _came(self, keys: Iterable[str], seconds: float) -> bool:
        """Whether all keys are there within so many seconds."""
        try:
            self._store.wait(list(keys), timedelta(seconds=max(seconds, 0.001)))  # 0: PyTorch would wait for ever
        except RuntimeError:
            return bool(self._store.check(list(keys)))
        return True

    def _absent(self, owners: Mapping[str, int]) -> list[int]:
        return [rank for key, rank in owners.items() if not self._store.check([key])]

    def _known(self, ranks: Sequence[int]) -> str:
        return ", ".join(self.known[rank].name if rank in self.known else f"rank {rank}" for rank in ranks)

    def _error(self, missing: Sequence[Missing], wanted: Wanted) -> LaunchError:
        if not wanted.ranks:
            return super()._error(missing, wanted)
        names = self._known([one.rank for one in missing])
        return LaunchError(
            f"{names} did not join the group of ranks {list(self.ranks)} within {self.seconds:g} s; every rank must "
            "make the same groups in the same order"
        )


class StoreJob(Job):
    """The ranks that share a store of PyTorch, as a job.

    Args:
        store: of these ranks, used for nothing else.
        rank: of this process among them.
        ranks: their numbers in the script's job.
        seconds: how long an exchange waits for a rank.

    Attributes:
        known: the processes of the ranks of all groups so far, by number in the script's job, for errors.
        default_store: the default group's, under `distopt run`. A server lives as long as rank 0 has a store of it, and
            other ranks may look for a next default group while rank 0 still leaves this one.
        numbers: the argument `ranks`.
        processes: the processes of these ranks.
        ranks_of_hosts: the ranks of each host, in the order of the first of them.
        local_ranks: those of this host.
        seconds: see above.
    """

    known: ClassVar[dict[int, Process]] = {}
    default_store: ClassVar[dist.Store | None] = None

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], seconds: float) -> None:
        """Collective.

        Raises:
            LaunchError: a rank did not come.
        """
        self.seconds, self.numbers = seconds, ranks
        self._client = StoreClient(store, ranks[rank], ranks, seconds)
        self._client.known = self.known
        note = [host_identity(), socket.gethostname(), os.getpid(), token_bytes(16).hex()]
        identities, hosts, pids, keys = zip(*self.exchange(note), strict=True)
        self.processes = list(map(Process, ranks, hosts, pids))
        self.known.update(zip(ranks, self.processes, strict=True))
        self.topology, self.ranks_of_hosts, self.local_ranks = places_of(rank, identities, hosts)
        self._key = bytes.fromhex(keys[self.local_ranks[0]])

    def client(self) -> StoreClient:
        """Local here. The key-value client: through the store."""
        return self._client

    def forget(self) -> None:
        """Local, when all ranks have read them. Delete the payloads of this rank in the store."""
        self._client.forget()

    def _make_host_group(self) -> HostGroup:
        local, limit = self.topology, Settings.from_env().stall_warning
        return HostGroup(self._key, local.local_rank, local.local_size, self.seconds, Absence(limit))
