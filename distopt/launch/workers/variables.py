"""The environment of the ranks of a worker: where the service is, and the key to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

_ENDPOINT, _KEY = "DISTOPT_WORKERS_ENDPOINT", "DISTOPT_WORKERS_KEY"


class Place(NamedTuple):
    """The service, as a rank finds it.

    Attributes:
        host: of its endpoint.
        port: there.
        key: of the job.
    """

    host: str
    port: int
    key: bytes


def variables(endpoint: str, key: bytes) -> dict[str, str]:
    """The environment of the process that supervises a worker; its ranks inherit it."""
    return {**os.environ, _ENDPOINT: endpoint, _KEY: key.hex()}


def place_in(env: Mapping[str, str]) -> Place | None:
    """The service; None if no `distopt run --workers` has started this process."""
    if not (endpoint := env.get(_ENDPOINT)):
        return None
    host, _, port = endpoint.rpartition(":")
    return Place(host, int(port), bytes.fromhex(env[_KEY]))
