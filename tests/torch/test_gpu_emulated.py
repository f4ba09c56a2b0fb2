"""PyTorch's front with tensors on emulated GPUs, which ends with the bits of the CPU.

This file imports no PyTorch: it looks once for devices, so each process activates the emulator before.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from instruments.emulation import build
from instruments.emulation.torch_gpu import activate_for_torch
from tests.conformance.ranks import LocalJob, join_gloo, run_ranks_ok
from tests.processes import Program

FOUND = importlib.util.find_spec("torch")
if FOUND is None:
    pytest.skip("PyTorch is missing", allow_module_level=True)
if runpy.run_path(str(Path(FOUND.origin).with_name("version.py")))["cuda"]:
    pytest.skip("this PyTorch has CUDA; the stand-in serves builds for CPUs", allow_module_level=True)

RUN = (
    "import sys, pytest; from instruments.emulation.torch_gpu import activate_for_torch; activate_for_torch(); "
    "import torch; torch.set_default_device('cuda'); "
    "waits = []; torch.cuda.synchronize = waits.append; code = pytest.main(sys.argv[1:]); "
    "print(len(waits), 'waits for', *{*waits}); sys.exit(code)"
)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    build.build()
    build.torch_gpu()


def join(job: LocalJob) -> None:
    """Collective. A GPU for each rank, and a group whose collectives of GPUs are empty: DDP calls them at its start."""
    activate_for_torch()
    import torch
    import torch.testing._internal.distributed.fake_pg

    from distopt.torch import tensors
    from distopt.torch.checkpoint import trees
    from distopt.torch.training import parameters

    def readable(row: torch.Tensor, *dtype: Any) -> Any:
        assert row.is_cpu, "the host cannot read the memory of a real GPU"
        return array_of(row, *dtype)

    array_of = tensors.array_of
    parameters.array_of = trees.array_of = readable
    torch.cuda.set_device(job.topology.rank)
    join_gloo(job, "cpu:gloo,cuda:fake")


def train(job: LocalJob, where: str) -> None:
    join(job)
    import torch

    from distopt.comm.nccl import NcclCommunicator
    from tests.gpu.test_torch_codecs import compare

    hook = importlib.import_module("distopt.torch.training.hook")
    devices: list[Any] = []

    class Future(torch.futures.Future):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            devices.append(options["devices"])

    hook.Future = Future
    with mock.patch.object(NcclCommunicator, "create", wraps=NcclCommunicator.create) as create:
        for front in ("hook", "DistOpt", "DiLoCo"):
            compare(front + where, job.topology.rank, rtol=0.0, atol=0.0)
    assert create.call_count == (0 if where else 1), "all share a communicator of NCCL"
    # Without its device, a future makes no stream wait; here, operations of PyTorch end before it is given a result.
    on_gpu = [torch.device("cuda", job.topology.rank)]
    assert all(each in (None, on_gpu) for each in devices)
    assert devices.count(on_gpu) == 2 * devices.count(None) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "where"), [(2, ""), (2, " via host"), (1, " via host")])
def test_codecs_give_the_bits_of_the_cpu(ranks: int, where: str) -> None:
    run_ranks_ok(train, ranks, where)


class Job:
    """A model with running statistics and dropout, and all that its checkpoint has."""

    def __init__(self, folder: Path, device: str) -> None:
        import torch

        import distopt.torch
        from distopt import codecs

        torch.manual_seed(7)
        layers = torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.ReLU(), torch.nn.Linear(30, 10)
        self.model = torch.nn.Sequential(*layers).to(device)
        codec = codecs.create("top-k", ratio=0.05, error_feedback=True)
        inner = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.optimizer = distopt.torch.DistOpt(inner, model=self.model, codec=codec, via_host=True)
        objects = {"model": self.model, "optimizer": self.optimizer}
        self.checkpoint = distopt.torch.Checkpoint(folder, **objects)
        self.resumed, self.device = self.checkpoint.resume(), device

    def train(self, rank: int, last: int) -> list[Any]:
        """From the step where the checkpoint is; parameters, statistics, and numbers of the GPU's generator."""
        import torch

        for step in range(self.checkpoint.steps, last):
            generator = torch.Generator().manual_seed(100 * step + rank)
            x = torch.randn(16, 40, generator=generator).to(self.device)
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.checkpoint.step()
        tensors = [*self.model.state_dict().values(), *self.optimizer.state_dict()["engine"].values()]
        return [tensor.cpu() for tensor in tensors]


def resume(job: LocalJob, folder: Path) -> None:
    """On a GPU, from what was saved there and on a CPU."""
    join(job)
    import torch

    from tests.torch.checks.ranks import same

    rank = job.topology.rank
    expected = Job(folder / "none", "cpu").train(rank, 6)
    for saves, resumes in (("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")):
        first = Job(folder / f"{saves} {resumes}", saves)
        first.train(rank, 3)
        drawn = torch.cuda.default_generators[rank].get_state()
        first.checkpoint.save()
        first.checkpoint.close()
        first.optimizer.close()
        torch.cuda.default_generators[rank].manual_seed(123)
        second = Job(folder / f"{saves} {resumes}", resumes)
        assert second.resumed is not None
        same(torch.cuda.default_generators[rank].get_state(), drawn)
        same(second.train(rank, 6), expected, (saves, resumes))
        second.checkpoint.close()
        second.optimizer.close()


@pytest.mark.slow
def test_checkpoints(tmp_path: Path) -> None:
    run_ranks_ok(resume, 2, tmp_path)


# Of `tests.torch.checks.codecs`; the others compare by a group of PyTorch's.
CHECKS = ["dist_opt_joins", "dist_opt_after_an_exception", "dist_opt_of_unused_parameters"]
CHECKS += ["dist_opt_of_gradients_that_are_not_means", "dist_opt_with_a_grad_scaler", "diloco"]
CHECKS += ["diloco_skips_bad_changes", "bad_gradients", "codec_states_in_memory_formats"]
CHECKS += ["parameters_that_the_loss_does_not_reach"]


def run_checks(job: LocalJob) -> None:
    join(job)
    import torch

    torch.set_default_device(f"cuda:{job.topology.rank}")
    from tests.torch.checks import codecs
    from tests.torch.checks.ranks import Ranks

    for name in CHECKS:
        getattr(codecs, f"check_{name}")(Ranks(job.topology.rank, [2]))


@pytest.mark.slow
def test_checks_of_those_on_the_cpu() -> None:
    run_ranks_ok(run_checks, 2)


def use(job: LocalJob) -> None:
    """What CuPy does on a stream of PyTorch's, and what is refused."""
    join(job)
    import cupy
    import torch

    import distopt.torch
    from distopt.errors import UsageError
    from distopt.torch.checkpoint.states import ModelState
    from distopt.torch.training import gpu

    device, stream, outer = torch.device("cuda", 1), torch.cuda.Stream("cuda:1"), cupy.cuda.get_current_stream()
    allocate, free, held = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete, {}

    def allocated(size: int, device: int, stream: int) -> int:
        address = allocate(size, device, stream)
        held[address] = device, stream
        return address

    def freed(address: int) -> None:
        del held[address]
        free(address)

    torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete = allocated, freed
    with gpu.current_stream(device):
        assert torch.cuda.current_device() == cupy.cuda.runtime.getDevice() == 1
    with torch.cuda.stream(stream), gpu.current_stream(device):
        assert cupy.cuda.get_current_stream().ptr == stream.cuda_stream != 0
        assert torch.cuda.current_device() == cupy.cuda.runtime.getDevice() == 1
        array = cupy.empty(5, "float32")
        assert held == {array.data.ptr: (1, stream.cuda_stream)}
        del array
        assert not held

        def refuse(*_: Any) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory")

        torch.cuda.caching_allocator_alloc = refuse
        with pytest.raises(MemoryError, match="out of memory"):
            cupy.empty(5, "float32")
    torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete = allocate, free
    assert (cupy.cuda.get_current_stream(), torch.cuda.current_device()) == (outer, 0)

    model = torch.nn.BatchNorm1d(3).cuda()
    with pytest.raises(UsageError, match="steps in shards run on CPUs, and the parameters are on cuda:0"):
        distopt.torch.DistOpt(torch.optim.SGD(model.parameters(), 0.1), model=model, shards=2)
    for via_host in (False, True):
        inner, averaged = (torch.optim.SGD(model.parameters(), lr) for lr in (0.1, 0.7))
        local = distopt.torch.DiLoCo(model, inner, averaged, via_host=via_host)
        for name, tensor in local.average().items():
            assert torch.equal(tensor, model.state_dict()[name])
        local.close()
    state = ModelState(model, {id(param) for param in model.parameters()})
    for count in range(3):
        assert state.own().arrays["num_batches_tracked"] == count
        model(torch.ones(2, 3, device="cuda"))


def test_streams_memory_and_what_is_refused() -> None:
    run_ranks_ok(use, 1)


@pytest.mark.slow
def test_members_that_change() -> None:
    """The tests of those on the CPU, in a process where PyTorch makes tensors on a GPU."""
    ended = Program(
        [sys.executable, "-c", RUN, "-q", "-p", "no:cacheprovider", "tests/torch/test_members.py"],
        {"PATH": os.environ["PATH"]},
    ).end()
    assert ended.code == 0, ended.stdout + ended.stderr
    assert "skipped" not in ended.stdout
    assert re.search(r"^[1-9]\d* waits for cuda:0$", ended.stdout, re.M), "states are copied in another thread"
