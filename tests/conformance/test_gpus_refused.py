"""GPUs that the ranks cannot use: `auto` says so in one line and takes the CPU; an explicit wish is an error."""

import os
import re
import sys

import numpy as np
import pytest

from distopt import comm
from distopt.errors import LaunchError, MissingDependencyError
from instruments.emulation import activate

from .ranks import LocalJob, log_of_distopt, with_ranks

pytestmark = pytest.mark.usefixtures("built")

SHARED = r"ranks 0 and 1 on .* would both use GPU .*, of 1 that rank 1 sees; start no more ranks than GPUs"
# Machine states, and the log line for each. unit/test_nccl_setup.py has other software that may be missing.
LACKS = {
    "one GPU": SHARED,
    "no memory": r"rank 1 \(.*\) cannot use GPU .* \(out of memory\); end the processes that nvidia-smi lists",
    "exclusive": r"rank 1 \(.*\) cannot use GPU .* \(.*busy or unavailable\); end the processes that nvidia-smi lists",
    "no CuPy": r"CuPy cannot be used \(.*\); pip install --upgrade 'cupy-cuda13x\[ctk\]' nvidia-nccl-cu13 ",
}


def take_away(lack: str, rank: int) -> None:
    """Leave the emulated machine without what `lack` names; only rank 1 finds its GPU occupied."""
    if lack == "one GPU":
        os.environ["DISTOPT_EMULATED_GPUS"] = "1"
    elif lack == "no CuPy":
        sys.modules["cupy"] = None  # type: ignore[assignment]
        return
    import cupy

    def refuse(*_: object) -> None:
        if lack == "no memory":
            raise MemoryError("out of memory")
        raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorDevicesUnavailable: busy or unavailable")

    if rank == 1 and lack == "no memory":
        cupy.empty = refuse
    elif rank == 1 and lack == "exclusive":
        cupy.cuda.Device.use = refuse


@pytest.mark.slow(kept=4)
@pytest.mark.parametrize("lack", LACKS)
@with_ranks(2)
def test_auto_takes_the_cpu_in_one_line_and_an_explicit_wish_is_an_error_with_the_cure(
    job: LocalJob, lack: str
) -> None:
    os.environ["DISTOPT_DEVICE"] = "auto"
    activate()
    rank = job.topology.rank
    take_away(lack, rank)
    lines, array = log_of_distopt(), np.full(5, rank + 1.0)
    with comm.create(job) as made:
        made.all_reduce(array).wait()
    assert (made.name, array[4], len(lines)) == ("shm", 3.0, 1 - rank)
    for line in lines:
        assert line.startswith("using the CPU: ")
        assert line.endswith(" (DISTOPT_DEVICE=cpu stops this notice)")
        assert "\n" not in line
        assert re.search(LACKS[lack], line)
    for transport, device in (("nccl", "auto"), ("auto", "cuda")):
        os.environ["DISTOPT_DEVICE"] = device
        with pytest.raises((LaunchError, MissingDependencyError), match=LACKS[lack]):
            comm.create(job, transport)
