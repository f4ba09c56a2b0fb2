import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.faults.healing import Job


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    """Starts a job that heals, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def started(*commands: list[str]) -> Job:
            job = Job(*commands)
            stack.callback(job.kill)
            return job

        yield started
