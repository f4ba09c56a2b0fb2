"""The first failure of a group on several hosts, left in its store, so that all ranks name the same cause."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from .. import errors
from ..errors import CommunicatorError, Process

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Cause"]

_KEY = "failure"
_PATIENCE_SECONDS = 2.0  # in which whoever knows the cause has said so
_NAP_SECONDS = 0.05


class Cause:
    """Where the ranks leave the first failure.

    Args:
        store: the group's own.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def of(self, error: CommunicatorError, *, is_known: bool) -> CommunicatorError:
        """Local. What has failed first, as far as the ranks know; `error` itself if no other rank has said.

        Args:
            error: this rank's.
            is_known: whether it is the cause rather than what came of another failure.
        """
        found: list[bytes] = []
        # A store whose host is gone answers late, or never.
        asker = threading.Thread(target=self._ask, args=(error, is_known, found), name="distopt cause", daemon=True)
        asker.start()
        asker.join(2 * _PATIENCE_SECONDS)
        with suppress(ValueError, KeyError, AttributeError, TypeError):
            kind, fact, cure, ranks = json.loads(found[0] if found else "null")
            return getattr(errors, kind)(fact, cure=cure, ranks=[Process(*one) for one in ranks])  # type: ignore[no-any-return]
        return error

    def _ask(self, error: CommunicatorError, is_known: bool, found: list[bytes]) -> None:
        mine = json.dumps([type(error).__name__, error.fact, error.cure, error.ranks])
        pause = threading.Event()
        with suppress(RuntimeError):  # of a store that has ended
            store = self._store.clone()  # others of this process may be waiting in the store itself
            for _ in range(0 if is_known else int(_PATIENCE_SECONDS / _NAP_SECONDS)):
                if store.check([_KEY]):
                    break
                pause.wait(_NAP_SECONDS)
            found.append(store.compare_set(_KEY, "", mine))
