"""Failures that are known: by name, which errors of which programs are excused. Empty when all repairs are there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

KNOWN: dict[str, Callable[[Any, Exception], bool]] = {}
