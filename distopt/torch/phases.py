"""The phases of a training step in PyTorch, for the timeline: forward and backward passes, and updates."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import optimizer

from ..recorder.timeline import timeline
from .private import call_after_backward, current_backward_pass

_modules: list[torch.nn.Module] = []  # in their forward passes


def record_phases() -> None:
    """Local, once. Record the phases of all training steps from now on."""
    torch.nn.modules.module.register_module_forward_pre_hook(_enter)
    torch.nn.modules.module.register_module_forward_hook(_leave, with_kwargs=True)
    optimizer.register_optimizer_step_pre_hook(_update)
    optimizer.register_optimizer_step_post_hook(lambda *_: timeline.phase(""))


def _enter(module: torch.nn.Module, _: Any) -> None:
    if current_backward_pass() < 0:  # else it is computed again
        if timeline.phase_now != "forward":
            _modules.clear()  # an exception has ended the last forward pass
            timeline.phase("forward")
        _modules.append(module)


def _leave(_: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
    if current_backward_pass() < 0 and _modules:
        _modules.pop()
        if not _modules:
            values = out.values() if isinstance(out, dict) else out if isinstance(out, (list, tuple)) else [out]
            trained = [each for each in values if isinstance(each, torch.Tensor) and each.requires_grad]
            if trained:
                timeline.trained_on((*args, *named.values()))
                trained[0].register_hook(_begin_backward)
            else:
                timeline.phase("")


def _begin_backward(_: torch.Tensor) -> None:
    timeline.phase("backward")
    call_after_backward(lambda: timeline.phase(""))


def _update(*_: Any) -> None:
    if timeline.phase_now != "update":  # an optimizer may wrap another
        timeline.phase("update")
