"""Notices to the user: one line in the log, once."""

from __future__ import annotations

import logging

_log = logging.getLogger("distopt")
_told: set[str] = set()


def tell_once(text: str, level: int = logging.WARNING) -> None:
    """Local. Log `text` at this level, unless this process has done so before."""
    if text not in _told:
        _told.add(text)
        _log.log(level, "%s", text)
