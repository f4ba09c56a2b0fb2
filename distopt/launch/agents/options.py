"""The options of `distopt run`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...settings import Settings
from ..addresses import is_own

STDOUT, STDERR = 1, 2  # bits of torchrun's --redirects and --tee
ALL = -1


@dataclass(frozen=True)
class RunOptions:
    """The options of the command line.

    Attributes:
        program: the words that start a rank.
        ranks: number of ranks on this node, the largest of a range.
        nodes: number of nodes, the largest of a range.
        spare_ranks: how many of these ranks a job that heals can do without.
        spare_nodes: how many of these nodes a job that heals can do without.
        node_rank: number of this node, or None if the owner of the endpoint gives it.
        host: host of the endpoint; unused on one node.
        port: port of the endpoint; on one node, the port of PyTorch's store, or 0 for a free one.
        more_places: host and port of the other endpoints of a job that heals.
        static: whether node 0 owns the endpoint, instead of the node that has its address.
        run_id: name of the job.
        restarts: how many times to start all ranks again after a failure.
        heal: whether to start all ranks again as long as that leads to new steps, by a fork and from states in memory.
        log_dir: folder for the output of the ranks.
        redirects: by rank of this node, the output that goes to files only; `ALL` stands for ranks that are not in it.
        tee: the same, to files as well. Without both, all output goes there if there is a `log_dir`.
        shown_ranks: the ranks of this node whose output is shown (default: all).
        role: the value of torchrun's ROLE_NAME, which has no other meaning here.
        timeout: seconds that the nodes have to join.
        alone: whether a job that heals continues where less than half of its nodes can be reached.
        watch: what to show once a second of each rank: nothing, "table" or "json".
        workers: what has a world of its own: "node", "rank", or nothing.
    """

    program: tuple[str, ...]
    ranks: int = 1
    nodes: int = 1
    spare_ranks: int = 0
    spare_nodes: int = 0
    node_rank: int | None = None
    host: str = "127.0.0.1"
    port: int = 0
    more_places: tuple[tuple[str, int], ...] = ()
    static: bool = False
    run_id: str = "none"
    restarts: int = 0
    heal: bool = False
    log_dir: Path | None = None
    redirects: Mapping[int, int] = field(default_factory=dict)
    tee: Mapping[int, int] = field(default_factory=dict)
    shown_ranks: frozenset[int] | None = None
    role: str = "default"
    timeout: float = 300.0
    alone: bool = False
    watch: str = ""
    workers: str = ""

    def streams_of(self, local_rank: int) -> list[tuple[bool, bool]]:
        """For stdout and stderr of a rank of this node: whether it is shown, and whether it goes to a file."""
        redirects, tee = (each.get(local_rank, each.get(ALL, 0)) for each in (self.redirects, self.tee))
        logged = redirects | tee if self.redirects or self.tee else (STDOUT | STDERR) * (self.log_dir is not None)
        is_shown = self.shown_ranks is None or local_rank in self.shown_ranks
        shown = (tee | ~redirects) if is_shown else 0
        return [(bool(shown & stream), bool(logged & stream)) for stream in (STDOUT, STDERR)]

    @property
    def key(self) -> bytes:
        """The key by which agents of one job know each other."""
        kind = "distopt run --workers" if self.workers else "distopt run"
        return hashlib.sha256(f"{kind} {json.dumps(self.run_id)} {Settings.from_env().job_secret}".encode()).digest()

    def owns(self, host: str) -> bool:
        """Whether this node has the address of an endpoint at this host."""
        return self.node_rank == 0 if self.static and self.node_rank is not None else is_own(host)

    @property
    def endpoint(self) -> str:
        """The endpoints' name in messages."""
        return ",".join(f"{host}:{port}" for host, port in self.places)

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each endpoint."""
        return ((self.host, self.port), *self.more_places)
