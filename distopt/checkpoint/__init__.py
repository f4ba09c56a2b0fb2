"""Checkpoints: a job stops at any moment, and resumes from the last complete one.

The package imports `comm`, `launch`, `kernels` and `files`. It never knows what it saves: objects give and take their
states through an `Adapter`, and any object with `all_gather_bytes` may connect the ranks. Its functions are local
unless they say Collective.
"""

from __future__ import annotations

from ..errors import Preempted
from .checkpoint import Checkpoint
from .load import Resumed, load

__all__ = ["Checkpoint", "Preempted", "Resumed", "load"]
