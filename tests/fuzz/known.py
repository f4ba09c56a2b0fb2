"""Failures that are known: by name, which errors of which programs are excused. Empty when all repairs are there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distopt.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable


def skipped_step(program: Any, error: Exception) -> bool:
    return "against a run without" in str(error) and any(getattr(step, "bad", None) for step in program.steps)


def changed_options(program: Any, error: Exception) -> bool:
    return isinstance(error, StateError) and any(getattr(step, "saves", False) for step in program.steps)


KNOWN: dict[str, Callable[[Any, Exception], bool]] = {f.__name__: f for f in (skipped_step, changed_options)}
