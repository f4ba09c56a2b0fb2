"""Ranks on emulated GPUs."""

import os
from collections.abc import Sequence

from distopt.comm.nccl import NcclCommunicator
from distopt.settings import Settings
from tests.emulation import activate

from . import checks
from .ranks import PATIENT, LocalJob
from .run import run_checks

# Around what the stand-in for NCCL moves at once, 65,536 bytes, for all item sizes.
SIZES = (0, 1, 513, 32_801)
FEW_SIZES = (0, 1, 8_201)


def emulated_checks(job: LocalJob, names: Sequence[str]) -> dict[str, str | None]:
    activate()
    checks.SIZES, checks.FEW_SIZES = SIZES, FEW_SIZES
    return run_checks(job, "nccl", names)


def connect(job: LocalJob, settings: Settings = PATIENT, **fake: str) -> NcclCommunicator:
    """`fake` are variables of fake_nccl.cpp, without their prefix."""
    os.environ.update({f"FAKE_NCCL_{name}": value for name, value in fake.items()})
    activate()
    from distopt.comm.gpu import exchange_places, gpu_stack
    from distopt.comm.nccl import NcclCommunicator

    stack = gpu_stack()
    return NcclCommunicator(job, stack, exchange_places(job, stack), settings)
