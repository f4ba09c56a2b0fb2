"""Ranks on GPUs, real ones or emulated."""

import os
from collections.abc import Sequence
from typing import Any

from distopt.comm.nccl import NcclCommunicator
from distopt.comm.shm import ShmCommunicator
from distopt.comm.via_host import ViaHostCommunicator
from distopt.launch.job.base import Job
from distopt.settings import Settings
from instruments.emulation import activate

from . import checks, ranks
from .ranks import PATIENT, LocalJob, OverUcx
from .run import run_checks

# Around what the stand-in for NCCL moves at once, 65,536 bytes, for all item sizes.
SIZES = (0, 1, 513, 32_801)
FEW_SIZES = (0, 1, 8_201)


class ViaHost:
    """Arrays of GPUs over shared memory."""

    on_host: Any = ShmCommunicator

    @classmethod
    def create(cls, job: Job) -> ViaHostCommunicator:
        return ViaHostCommunicator(cls.on_host.create(job))


class ViaHosts(ViaHost):
    """The same over UCX."""

    on_host = OverUcx


def emulated_checks(job: LocalJob, transport: str, names: Sequence[str]) -> dict[str, str | None]:
    activate()
    checks.SIZES, checks.FEW_SIZES = SIZES, FEW_SIZES
    return run_checks(job, transport, names)


def connect(job: LocalJob, settings: Settings = PATIENT, **fake: str) -> NcclCommunicator:
    """`fake` are variables of fake_nccl.cpp, without their prefix."""
    os.environ.update({f"FAKE_NCCL_{name}": value for name, value in fake.items()})
    activate()
    from distopt.comm.gpu import exchange_places, gpu_stack

    stack = gpu_stack()
    return NcclCommunicator(job, stack, exchange_places(job, stack), settings)


def connect_via_host(job: LocalJob, settings: Settings = PATIENT) -> ViaHostCommunicator:
    activate()
    return ViaHostCommunicator(ranks.connect(job, settings))


VIA_HOST = "tests.conformance.nccl_ranks:ViaHost"
CONNECT = {"nccl": connect, "via-host": connect_via_host}
