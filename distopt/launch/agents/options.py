"""The options of `distopt run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
        timeout: seconds that the nodes have to join.
        alone: whether a job that heals goes on where less than half of its nodes can be reached.
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
    timeout: float = 300.0
    alone: bool = False
    watch: str = ""
    workers: str = ""

    @property
    def endpoint(self) -> str:
        """Its name in messages."""
        return ",".join(f"{host}:{port}" for host, port in self.places)

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each endpoint."""
        return ((self.host, self.port), *self.more_places)
