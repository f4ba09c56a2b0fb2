"""The loss of a rank, or of a host: the training on two hosts is over in seconds, says why, and leaves nothing.

A part of what `python -m tests.faults.hosts` measures. Needs root; is skipped elsewhere.
"""

from __future__ import annotations

import pytest

from .hosts import Trial, run


@pytest.mark.parametrize(
    ("launcher", "fault", "rank"),
    [
        ("mpiexec", "packets lost", 0),
        ("mpiexec", "SIGKILL", 3),
        ("mpiexec", "os._exit", 1),
        ("mpiexec", "exception", 2),
        ("srun", "link down", 0),
        ("srun", "SIGSEGV", 1),
        ("by hand", "exception", 3),
        ("distopt run", "SIGKILL", 2),
    ],
)
def test_training_ends(net, launcher, fault, rank):
    if net.is_open_mpi and launcher != "mpiexec":
        pytest.skip("connects ranks on several hosts by MPICH only")
    outcome = run(net, Trial(launcher, fault, rank, 0.3))
    assert not outcome.faults(), outcome.output
