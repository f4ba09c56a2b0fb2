import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from instruments.faults.healing import Job


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Writes a script into the test's folder: its path."""

    def write(text: str, name: str = "script.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    """Starts a job that heals, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def started(*commands: list[str], **options: Any) -> Job:
            job = Job(*commands, **options)
            stack.callback(job.kill)
            return job

        yield started
