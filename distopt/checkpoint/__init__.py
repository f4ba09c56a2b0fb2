"""Checkpoints: stop a job at any moment, and resume from the last complete one."""

from __future__ import annotations

from ..errors import Preempted
from .checkpoint import Checkpoint
from .load import Resumed, load

__all__ = ["Checkpoint", "Preempted", "Resumed", "load"]
