import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from instruments.faults.healing import Job
from tests.processes import RUN, Program


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Writes a script into the test's folder: its path."""

    def write(text: str, name: str = "script.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """For files of the ranks."""
    made = tmp_path / "ranks"
    made.mkdir()
    return made


@pytest.fixture
def run(script: Callable[..., str], folder: Path) -> Callable[..., Program]:
    """Starts a script on `n` ranks by `distopt run`; its first argument is the folder. `streams`: redirections."""

    def started(text: str, *words: str, n: int = 2, options: Sequence[str] = (), streams: str = "") -> Program:
        command = [*RUN, "--nproc-per-node", str(n), *options, script(text), str(folder), *words]
        return Program(["sh", "-c", f'exec "$@" {streams}', "sh", *command])

    return started


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    """Starts a job that heals, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def started(*commands: list[str], **options: Any) -> Job:
            job = Job(*commands, **options)
            stack.callback(job.kill)
            return job

        yield started
