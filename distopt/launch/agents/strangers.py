"""Processes that meet an agent and do not know the key of its job."""

from __future__ import annotations

import selectors
from collections.abc import Callable

from ..gate import Gate, Link

DIFFERENCE = "it has another --rdzv-id or DISTOPT_JOB_SECRET, or is not distopt run"


class AgentGate(Gate):
    """A gate of an agent, which says once that it has turned away a stranger.

    Args:
        key: of all agents.
        selector: waits for the connections.
        warn: prints a line.
    """

    def __init__(self, key: bytes, selector: selectors.BaseSelector, warn: Callable[[str], None]) -> None:
        super().__init__(key, selector)
        self._warn = warn
        self._has_warned = False

    def _turned_away(self, link: Link) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"turned away a connection from {link.address} that is not a node of this job: {DIFFERENCE}")
