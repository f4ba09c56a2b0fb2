"""Asking Slurm to start the job of this process again, from its beginning, when there is room for it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping

_SECONDS = 20.0  # for an answer of Slurm; 10 s is its own MessageTimeout


def slurm_job(env: Mapping[str, str] | None = None) -> str:
    """Local. Identity of the Slurm job of this process, as `scontrol` takes it; empty outside of one."""
    env = os.environ if env is None else env
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:  # the number of one task may stand for all
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "")


def requeue(job: str) -> str:
    """Local. Have Slurm end the job and queue it again.

    A job that Slurm is already ending is left alone: one that was cancelled must not come back, and one that was
    preempted without time of grace has been queued again.

    Args:
        job: see `slurm_job`.

    Returns:
        Nothing if Slurm has accepted; else why the job is not queued again.
    """
    try:
        state = re.search(r"JobState=(\w+)", _scontrol("show", "job", "--oneliner", job))
        if state is None or state[1] != "RUNNING":
            return f"Slurm ends job {job} itself ({state[1] if state else 'unknown state'})"
        _scontrol("requeue", job)
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.splitlines()[-1:]) or f"exit code {error.returncode}"
        return f"Slurm does not queue job {job} again: {said}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"Slurm cannot be asked to queue job {job} again: {error}"
    return ""


def _scontrol(*args: str) -> str:
    command = ["scontrol", *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS).stdout
