"""The names that SINGA's scripts take from `singa.singa_wrap`."""

from __future__ import annotations

from .launch.multiprocess import Ticket as NcclIdHolder

__all__ = ["NcclIdHolder"]
