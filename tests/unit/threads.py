"""Bodies of tests that run at once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distopt.errors import LaunchError


def in_threads(*bodies: Callable[[], Any]) -> list[Any]:
    """Run each body in a thread: its result, or its LaunchError. Another error is raised."""

    def outcome(body: Callable[[], Any]) -> Any:
        try:
            return body()
        except LaunchError as error:
            return error

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(outcome, bodies))
