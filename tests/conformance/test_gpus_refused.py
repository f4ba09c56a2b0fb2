"""GPUs that the ranks cannot use: `auto` says so in one line and takes the CPU; an explicit wish is an error."""

import os
import re
import sys

import numpy as np
import pytest

from distopt import comm
from tests.emulation import activate, build

from .ranks import LocalJob, run_ranks_ok
from .scenes import log_of_distopt

SHARED = r"ranks 0 and 1 on .* would both use GPU .*, of 1 that rank 1 sees; start no more ranks than GPUs"
# Machine states, and the log line for each. unit/test_nccl_setup.py has other software that may be missing.
LACKS = {
    "one GPU": SHARED,
    "no memory": r"rank 1 \(.*\) cannot use GPU .* \(out of memory\); end the processes that nvidia-smi lists",
    "exclusive": r"rank 1 \(.*\) cannot use GPU .* \(.*busy or unavailable\); end the processes that nvidia-smi lists",
    "no CuPy": r"CuPy cannot be used \(.*\); pip install --upgrade 'cupy-cuda13x\[ctk\]' nvidia-nccl-cu13 ",
}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    build.build()


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


def create(job: LocalJob, lack: str, transport: str, device: str) -> tuple[str, float, list[str]]:
    """Name of the communicator or error, a sum of ranks + 1 or 0, and the lines of the log or the error."""
    os.environ["DISTOPT_DEVICE"] = device
    activate()
    take_away(lack, job.topology.rank)
    lines = log_of_distopt()
    try:
        made = comm.create(job, transport)
    except Exception as error:
        return type(error).__name__, 0.0, [str(error)]
    array = np.full(5, job.topology.rank + 1.0)
    made.all_reduce(array).wait()
    made.close()
    return made.name, float(array[4]), lines


@pytest.mark.slow(kept=4)
@pytest.mark.parametrize("lack", LACKS)
def test_auto_takes_the_cpu_and_says_so_in_one_line(lack: str) -> None:
    first, second = run_ranks_ok(create, 2, lack, "auto", "auto")
    assert [first[:2], second[:2]] == [("shm", 3.0)] * 2
    (line,) = first[2]
    assert second[2] == []
    assert line.startswith("using the CPU: ")
    assert line.endswith(" (DISTOPT_DEVICE=cpu stops this notice)")
    assert "\n" not in line
    assert re.search(LACKS[lack], line)


@pytest.mark.slow(kept=4)
@pytest.mark.parametrize(("transport", "device"), [("nccl", "auto"), ("auto", "cuda")])
@pytest.mark.parametrize("lack", LACKS)
def test_an_explicit_wish_is_an_error_with_the_cure(lack: str, transport: str, device: str) -> None:
    for name, _, lines in run_ranks_ok(create, 2, lack, transport, device):
        assert name in {"LaunchError", "MissingDependencyError"}
        assert re.search(LACKS[lack], lines[0])
