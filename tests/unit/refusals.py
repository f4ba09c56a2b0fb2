"""Calls that are refused by one line."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(error: type[Exception], match: str, call: Callable[..., Any], *args: Any, **options: Any) -> Exception:
    """The exception of `call(*args, **options)`: an `error` of one line, in which `match` is found, if it is given."""
    with pytest.raises(error, match=match or None) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return caught.value
