"""Batch normalization by the statistics of all ranks. PyTorch's `SyncBatchNorm` refuses CPU tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..private import BatchNorm, batch_norm_backward, is_batch_norm


class SyncBatchNorm(BatchNorm):
    """`BatchNorm1d`, `2d` or `3d` that normalizes the batches of all ranks as if they were one batch.

    Batch sizes may differ: every value counts the same. Running statistics have the same bits on all ranks. In training
    mode each forward and each backward pass is collective, and waits for one all-reduce of 2 C + 1 or 2 C float64
    numbers. In evaluation mode, and without a process group, passes are local. States have the names of PyTorch's
    layers.

    Args:
        num_features: C of an input [N, C, ...].
        *args: see `torch.nn.BatchNorm2d`.
        process_group: the ranks (default: all).
        **options: see `torch.nn.BatchNorm2d`.
    """

    __module__ = "distopt.torch"  # pickled models name the public place

    def __init__(
        self, num_features: int, *args: Any, process_group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(num_features, *args, **options)
        self.process_group = process_group

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's name
        """Collective in training mode. The input [N, C, ...], normalized; of its shape and type.

        Raises:
            ValueError: the input has another shape, or all ranks together have at most one value per channel.
        """
        if not (self.training and dist.is_initialized()):
            return super().forward(input)
        self.check_input(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1 / float(self.num_batches_tracked) if self.momentum is None else factor
        running = self.running_mean, self.running_var
        group = self.process_group or dist.group.WORLD
        normalized: torch.Tensor = _Normalize.apply(input, self.weight, self.bias, running, factor, self.eps, group)
        return normalized

    def check_input(self, input: torch.Tensor) -> None:  # noqa: A002 - PyTorch's name
        """Local. Raise a ValueError unless it is [N, C, ...]."""
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ValueError(f"expected an input [N, {self.num_features}, ...], got {list(input.shape)}")

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> torch.nn.Module:
        """Local. Replace the batch normalizations in `module` by layers of this class with the same tensors.

        Make the optimizer and DDP afterwards.

        Returns:
            `module`, or the new layer if `module` is a batch normalization itself.
        """
        result = module
        if is_batch_norm(module) and not isinstance(module, cls):
            options = module.eps, module.momentum, module.affine, module.track_running_stats
            result = cls(module.num_features, *options, process_group=process_group, device="meta")
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                setattr(result, name, tensor)
            result.train(module.training)
        for name, child in module.named_children():
            setattr(result, name, cls.convert_sync_batchnorm(child, process_group))
        return result


class _Normalize(torch.autograd.Function):
    """Batch normalization by PyTorch's own kernels, with the statistics of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: tuple[torch.Tensor | None, torch.Tensor | None],
        factor: float,
        eps: float,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Collective. Normalize x [N, C, ...] by mean and variance of all ranks, and update the running ones."""
        axes = [axis for axis in range(x.dim()) if axis != 1]
        dtype = torch.promote_types(x.dtype, torch.float32)
        own = torch.zeros(2, x.size(1), dtype=torch.float64, device=x.device)
        if x.numel():
            own[1], own[0] = torch.var_mean(x.to(dtype), axes, correction=0)
        # The mean square from the variance: squares of float32 lose a variance that is small beside the mean.
        own[1] += own[0] ** 2
        sums = torch.cat([own.view(-1), own.new_ones(1)]) * (x.numel() // x.size(1))
        dist.all_reduce(sums, group=group)
        count = sums[-1].item()
        if count <= 1:
            raise ValueError(f"expected more than one value per channel on all ranks, got {count:g}")
        wide, squares = (sums[:-1] / count).view(2, -1)
        mean, var = wide.to(dtype), (squares - wide**2).clamp(min=0).to(dtype)
        running_mean, running_var = running
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), factor)
            running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), factor)
        ctx.save_for_backward(x, weight, mean, var)
        ctx.of_all = count, eps, group
        return functional.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Collective. The gradients of x, weight and bias."""
        x, weight, mean, var = ctx.saved_tensors
        count, eps, group = ctx.of_all
        scale = torch.ones_like(mean) if weight is None else weight
        if x.numel():
            # The gradients as if mean and variance were constants.
            statistics = mean, var, None, None, False, eps
            dx, dweight, dbias = batch_norm_backward(dy, x, scale, *statistics, [True] * 3)
        else:  # PyTorch's kernel would divide by zero
            dx, dweight, dbias = torch.zeros_like(x), torch.zeros_like(scale), torch.zeros_like(scale)
        if ctx.needs_input_grad[0]:
            totals = torch.stack([dweight, dbias]).double() * scale
            dist.all_reduce(totals, group=group)
            # Mean and variance depend on every x, which adds an affine function of x.
            slope, shift = (totals / ((var + eps).sqrt() * -count)).to(mean.dtype)
            dx += functional.batch_norm(x, mean, var, slope, shift, eps=eps)
        needs = ctx.needs_input_grad
        return dx if needs[0] else None, dweight if needs[1] else None, dbias if needs[2] else None, *[None] * 4
