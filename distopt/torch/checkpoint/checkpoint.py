"""Checkpoints of PyTorch's objects, over the files, the thread and the signals of `distopt.checkpoint`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ... import checkpoint
from ...checkpoint.folder import list_checkpoints, survey
from ...checkpoint.load import ranks_of
from ...data import ShardedSampler
from ...errors import UsageError
from .generators import TorchGenerator, global_generators
from .gradients import Gradients
from .ranks import GroupRanks
from .sampler import ResumableSampler
from .states import parts_of

if TYPE_CHECKING:
    from ...checkpoint import Resumed
    from ...checkpoint.adapters import Ranks

_log = logging.getLogger("distopt")


class Checkpoint(checkpoint.Checkpoint):
    """Saves a training job of PyTorch every few steps; it resumes there with the same bits.

    The ranks are those of a process group over any backend; a script without one is a job of one rank. Objects are
    saved and restored by the names of their arguments. They can be

    - models, perhaps inside DDP or `torch.compile`, which are saved under the names of the model itself;
    - optimizers, schedules, `GradScaler`, and other objects with `state_dict` and `load_state_dict` whose dictionaries,
      lists and tuples hold tensors, arrays and values of JSON. Nothing is pickled;
    - `ResumableSampler`, which resumes after the last sample that was trained;
    - random generators of PyTorch, NumPy and Python. The global ones are always saved.

    Gradients that no optimizer has used are saved, too, so `step` may be called after each batch of an update that
    accumulates over several. With another number of ranks, each rank resumes with the mean of theirs.

    Parameters of DDP's models and of a `DistOpt` with `shards=`, and the states of their optimizers, are the same on
    all ranks, and each rank writes a share. Each rank writes all of its other states, such as buffers and the shards of
    FSDP2. Jobs of FSDP2 resume with the same number of ranks only.

    A worker of a `DiLoCo(min_workers=)` writes to a folder of its own, `worker-NUMBER` below `folder`. It resumes from
    the newest of all of them, also on another number of workers, or on machines that see only some of them.

    Args:
        folder: of the checkpoints, on a file system that all ranks see; with None, nothing is saved.
        every: `step` saves after each multiple of this number of steps; 0 leaves it to calls of `save`.
        keep: number of complete checkpoints to keep.
        preemptible: whether signals save and end the job in time; see `distopt.checkpoint.Checkpoint`.
        group: the ranks (default: all).
        replicated: False if ranks train DDP's parameters independently for a while, as post-local SGD does.
        objects: see above.

    Attributes:
        steps: number of finished training steps.
        epoch: the last epoch that `step` or `save` was called with.

    Raises:
        UsageError: a number is out of range, or an object cannot be saved.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        *,
        every: int = 0,
        keep: int = 3,
        preemptible: bool = False,
        group: dist.ProcessGroup | None = None,
        replicated: bool = True,
        **objects: Any,
    ) -> None:
        """Collective."""
        self._samplers = [thing for thing in objects.values() if isinstance(thing, ResumableSampler)]
        self._models = [thing for thing in objects.values() if isinstance(thing, torch.nn.Module)]
        self._in_shards = any(getattr(thing, "is_in_shards", False) is True for thing in objects.values())
        self._optimizers = {name: each for name, each in objects.items() if isinstance(each, torch.optim.Optimizer)}
        _check_samplers(objects)
        parts = {
            **parts_of(objects, replicated=replicated),
            **global_generators(),
            "gradients.waiting": Gradients(objects),
        }
        self._generators = [part for part in parts.values() if isinstance(part, TorchGenerator)]
        workers = [thing for thing in objects.values() if hasattr(thing, "worker_of_checkpoint")]
        number = workers[0].worker_of_checkpoint if workers else None
        if folder is not None and number is not None:
            folder = Path(folder) / f"worker-{number}"
        self._worker: int | None = number
        super().__init__(
            folder, every=every, keep=keep, preemptible=preemptible, communicator=_ranks_of(group), **parts
        )

    def resume(self, reset: bool = False) -> Resumed | None:
        """Collective. Resume from the last complete checkpoint; see `distopt.checkpoint.Checkpoint.resume`.

        Learning rates and schedules become those of the states. With another number of ranks, one line names the rates
        that the script had chosen otherwise.
        """
        chosen = {name: _rates(each) for name, each in self._optimizers.items()}
        resumed = super().resume(reset)
        if resumed is not None:
            if self._rank == 0 and resumed.world_size != self._communicator.topology.world_size:
                _tell_rates(chosen, self._optimizers)
            for sampler in self._samplers:
                sampler.continue_with(self._put_generators_again)
        return resumed

    def _source(self, root: Path) -> Path:
        """Local. The folder to resume from: of a worker, one of those with the newest checkpoint, each another."""
        if self._worker is None:
            return root
        found = [folder for each in root.parent.glob("worker-*") for folder in _complete(each)]
        last = max((folder.name for folder in found), default="")
        newest = sorted(folder.parent for folder in found if folder.name == last)
        return newest[self._worker % len(newest)] if newest else root

    def _is_in_shards(self, objects: Mapping[str, Any]) -> bool:
        return self._in_shards

    def _watch(self, after_forward: Callable[[], object], before_update: Callable[[], object]) -> None:
        register_optimizer_step_pre_hook(lambda *_: before_update() and None)
        for model in self._models:
            model.register_forward_hook(lambda model, *_: after_forward() and None if model.training else None)

    def _put_generators_again(self) -> None:
        for generator in self._generators:
            generator.put_again()


def load(
    folder: str | os.PathLike[str], group: dist.ProcessGroup | None = None, *, replicated: bool = True, **objects: Any
) -> Resumed | None:
    """Collective. Load objects, for example only a model, from the newest complete checkpoint; nothing is written.

    Args:
        folder: of the checkpoints.
        group: the ranks (default: all).
        replicated: see `Checkpoint`.
        objects: the objects to load, by the names under which they were saved.

    Returns:
        See `distopt.checkpoint.load`, for errors too.
    """
    return checkpoint.load(folder, _ranks_of(group), **parts_of(objects, replicated=replicated))


def _complete(root: Path) -> list[Path]:
    """The complete checkpoints in a folder, by age."""
    return [folder for folder in list_checkpoints(root) if survey(folder).whole]


def _check_samplers(objects: dict[str, Any]) -> None:
    for name, thing in objects.items():
        if isinstance(thing, ShardedSampler) and not isinstance(thing, ResumableSampler):
            raise UsageError(
                f"{name} is a ShardedSampler, which counts the batches that it has given, also to the workers of a "
                "loader that fetch ahead of training; pass a distopt.torch.ResumableSampler, which counts steps"
            )


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each group, before schedules."""
    return [float(group.get("initial_lr", group.get("lr", 0))) for group in optimizer.param_groups]


def _tell_rates(chosen: dict[str, list[float]], optimizers: dict[str, torch.optim.Optimizer]) -> None:
    for name, optimizer in optimizers.items():
        if (loaded := _rates(optimizer)) != chosen[name]:
            _log.warning(
                "%s resumes with the learning rates %s of its states, not with %s of the script; where they or the "
                "length of a schedule depend on the number of ranks, set them after Checkpoint.resume",
                name, loaded, chosen[name],
            )  # fmt: skip


def _ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    return GroupRanks(group) if dist.is_initialized() else ranks_of({})
