"""Notices to the user: one line in the log, once."""

from __future__ import annotations

import logging

_log = logging.getLogger("distopt")
_logged: set[str] = set()


def log_once(text: str) -> None:
    """Log `text` as a warning, unless this process has done so before."""
    if text not in _logged:
        _logged.add(text)
        _log.warning("%s", text)
