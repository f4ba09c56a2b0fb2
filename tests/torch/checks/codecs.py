"""Codecs: hooks of DDP, DistOpt and DiLoCo over groups of distopt and of Gloo, against DDP and one process."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import distopt.torch
from distopt import codecs
from distopt.errors import GradientError, MismatchError, StateError, UsageError

from ..forked import group_with_gloo
from .ddp import network
from .ranks import Ranks, same, same_on_all_ranks

CODECS = {
    "fp32": {},
    "fp16": {},
    "bf16": {},
    "top-k": {"ratio": 0.05, "error_feedback": True},
    "threshold": {"bound": 0.01, "error_feedback": True},
    "power-sgd": {"error_feedback": True},
}
SMALL = 200  # elements of a bucket: the network has several


def batches(rank: int, count: int, first: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(100 * step + rank)
        yield torch.randn(4, 1, 8, 8, generator=generator), torch.randint(10, (4,), generator=generator)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int = 5, first: int = 0) -> None:
    for step, (x, y) in enumerate(batches(rank, count, first)):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def params_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in model.parameters()]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def dist_opt(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    options = {"bucket_elements": SMALL, **options}
    return distopt.torch.DistOpt(optimizer or sgd(model), model.named_parameters(), **options)


def hooked(name: str, group: dist.ProcessGroup, **options: Any) -> tuple[Any, Any]:
    model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.005)
    state, function = distopt.torch.hook(model, name, group=group, bucket_elements=SMALL, **options)
    model.register_comm_hook(state, function)
    return model, state


def check_codecs_of_hooks(r: Ranks) -> None:
    """The same bits over groups of distopt and of Gloo, as those of DistOpt, and on all ranks; as many bytes."""
    gloo = group_with_gloo(r.all)
    for name, options in CODECS.items():
        found, sent = [], []
        for group in (dist.group.WORLD, gloo):
            model, state = hooked(name, group, **options)
            train(model, sgd(model), r.rank)
            found.append(params_of(model))
            sent.append(state.stats().total.wire_bytes)
        model = network()
        optimizer = dist_opt(model, codec=codecs.create(name, **options))
        train(model, optimizer, r.rank)
        found.append(params_of(model))
        sent.append(optimizer.stats().total.wire_bytes)
        assert len(set(sent)) == 1, (name, sent)
        assert len(optimizer.stats().buckets) > 1
        for one, two, three in zip(*found, strict=True):
            same(one, two, name)
            same(one, three, name)
            same_on_all_ranks(one, name)
        assert not torch.equal(found[0][0], params_of(network())[0]), name
    dist.destroy_process_group(gloo)


def check_dist_opt_is_ddp(r: Ranks) -> None:
    rules: list[Callable[[torch.nn.Module], torch.optim.Optimizer]] = [
        sgd,
        lambda model: torch.optim.AdamW(model.parameters(), 0.01, foreach=True),
        lambda model: torch.optim.AdamW(model.parameters(), 0.01, fused=True),
    ]
    for rule in rules:
        model = DistributedDataParallel(network(), bucket_cap_mb=0.005)
        optimizer = rule(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        own = network()
        if r.rank:
            with torch.no_grad():  # replaced by those of rank 0
                next(own.parameters()).add_(1)
        ours = dist_opt(own, rule(own), clip_grad_norm=None)
        our_schedule = torch.optim.lr_scheduler.StepLR(ours, 1, 0.5)
        for first in range(4):
            train(model, optimizer, r.rank, 2, first)
            train(own, ours, r.rank, 2, first)
            schedule.step()
            our_schedule.step()
        r.same_as_gloo(params_of(own), params_of(model), rtol=1e-4, atol=1e-5)
        assert ours.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def check_dist_opt_clips_what_it_steps_by(r: Ranks) -> None:
    """The norm of the gradients of two passes together, also when a GradScaler has unscaled them, against DDP."""
    for scales in (False, True):
        model, own = DistributedDataParallel(network()), network()
        theirs, ours = sgd(model), dist_opt(own, clip_grad_norm=0.05, non_finite="skip")
        for trained, optimizer in ((model, theirs), (own, ours)):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scales)
            for (x, y), (u, v) in zip(batches(r.rank, 3), batches(r.rank, 3, 3), strict=True):
                optimizer.zero_grad()
                scaler.scale(torch.nn.functional.cross_entropy(trained(x), y)).backward()
                scaler.scale(torch.nn.functional.cross_entropy(trained(u), v)).backward()
                scaler.unscale_(optimizer)
                if optimizer is theirs:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                scaler.step(optimizer)
                scaler.update()
        r.same_as_gloo(params_of(own), params_of(model), rtol=1e-4, atol=1e-5)


def check_dist_opt_averages_what_hooks_have_made(r: Ranks) -> None:
    """Hooks of the script that change `.grad`, registered before DistOpt's or after them, against DDP.

    A model that is converted between steps, and back, is averaged, too.
    """

    def register(model: torch.nn.Module) -> None:
        for place, param in enumerate(model.parameters()):
            param.register_post_accumulate_grad_hook(
                lambda p, place=place: setattr(p, "grad", p.grad * ((place + 1) / 6))
            )

    for after in (False, True):
        model, own = network(), network()
        register(model)
        if not after:
            register(own)
        ddp, ours = DistributedDataParallel(model, bucket_cap_mb=0.005), dist_opt(own)
        if after:
            register(own)
        theirs = sgd(ddp)
        train(ddp, theirs, r.rank)
        train(own, ours, r.rank)
        own.double().float()
        train(ddp, theirs, r.rank, 3, 5)
        train(own, ours, r.rank, 3, 5)
        r.same_as_gloo(params_of(own), params_of(model), rtol=1e-4, atol=1e-5)


def check_hooks_average_over_the_group_of_ddp(r: Ranks) -> None:
    """Each rank but the last in a group with the next one only; the hook is not told."""
    pairs = [dist.new_group([first, first + 1][: r.size - first]) for first in range(0, r.size, 2)]
    group = pairs[r.rank // 2]
    other, ours = (DistributedDataParallel(network(), process_group=group) for _ in range(2))
    ours.register_comm_hook(*distopt.torch.hook(ours))
    for ddp in (other, ours):
        train(ddp, sgd(ddp), r.rank)
    for one, two in zip(params_of(other), params_of(ours), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    if r.size > 2:
        with pytest.raises(UsageError, match=r"DDP averages over the ranks \[.*\], and group= has others"):
            distopt.torch.hook(ours, group=dist.group.WORLD)


def check_dist_opt_joins(r: Ranks) -> None:
    """Ranks with different numbers of batches, against one process: a step is the mean over those with data."""
    own, expected = network(), network()
    ours, theirs = dist_opt(own), sgd(expected)
    with ours.join():
        train(own, ours, r.rank, 2 + r.rank)
    data = [list(batches(rank, 2 + rank)) for rank in r.all]
    for step in range(1 + r.size):
        here = [mine[step] for mine in data if step < len(mine)]
        grads = []
        for x, y in here:
            theirs.zero_grad()
            torch.nn.functional.cross_entropy(copy.deepcopy(expected)(x), y)
            loss = torch.nn.functional.cross_entropy(expected(x), y)
            grads.append(torch.autograd.grad(loss, list(expected.parameters())))
        for param, *parts in zip(expected.parameters(), *grads, strict=True):
            param.grad = torch.stack(parts).mean(0)
        theirs.step()
    for one, other in zip(params_of(own), params_of(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        same_on_all_ranks(one)


def check_dist_opt_updates_partially(r: Ranks) -> None:
    model = network()
    optimizer = dist_opt(model, partition_elements=SMALL)
    train(model, optimizer, r.rank, 1)
    ((x, y),) = batches(r.rank, 1, 1)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    grads = [param.grad.clone() for param in model.parameters()]
    optimizer.step()
    before = params_of(model)
    optimizer.synchronize()
    for param, grad in zip(model.parameters(), grads, strict=True):
        same(param.grad, grad, "after a step, .grad is what it was")
    for one, mine in zip(params_of(model), before, strict=True):
        same_on_all_ranks(one)
        every = [torch.empty_like(mine) for _ in r.all]
        dist.all_gather(every, mine)
        torch.testing.assert_close(one, torch.stack(every).mean(0))
    assert any(not torch.equal(one, mine) for one, mine in zip(params_of(model), before, strict=True))


def check_dist_opt_of_a_bad_gradient(r: Ranks) -> None:
    (x, y), (u, v) = batches(r.rank, 2)
    bad = x * float("nan") if r.rank == r.size - 1 else x
    for codec in ("fp32", "top-k"):
        for non_finite in ("raise", "skip"):
            model = network()
            optimizer = dist_opt(model, codec=codec if codec == "fp32" else codecs.TopK(0.1), non_finite=non_finite)
            before = params_of(model)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(bad), y)
            if non_finite == "raise":
                with pytest.raises(GradientError, match=rf"rank {r.size - 1} .*lower the learning rate"):
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
            for one, other in zip(params_of(model), before, strict=True):
                same(one, other)
            model.load_state_dict(network().state_dict())
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(u), v).backward()
            optimizer.step()
            same_on_all_ranks(params_of(model)[0])
            assert not torch.equal(params_of(model)[0], before[0])


def check_hooks_go_on_after_a_bad_gradient(r: Ranks) -> None:
    """A step that a script leaves out after its GradientError has left no trace."""
    for name in ("fp32", "top-k"):
        found = []
        for is_bad in (False, True):
            model, _ = hooked(name, dist.group.WORLD, **CODECS[name])
            optimizer = sgd(model)
            train(model, optimizer, r.rank, 3)
            if is_bad:
                ((x, y),) = batches(r.rank, 1, 9)
                bad = torch.nn.functional.cross_entropy(model(x * torch.nan if r.rank == r.size - 1 else x), y)
                with pytest.raises(GradientError, match=rf"step 3: .* rank {r.size - 1} "):
                    bad.backward()
            train(model, optimizer, r.rank, 2, 3)
            found.append(params_of(model))
        for one, other in zip(*found, strict=True):
            same(one, other, name)


def check_dist_opt_of_other_gradients(r: Ranks) -> None:
    """Sparse gradients, and parameters in channels_last, as DDP has them; limits are those of one process."""

    def models() -> Iterator[tuple[torch.nn.Module, torch.Tensor, bool]]:
        torch.manual_seed(4)
        for sparse in (False, True):
            embedding = torch.nn.Embedding(20, 6, sparse=sparse)
            yield torch.nn.Sequential(embedding, torch.nn.Linear(6, 2)), torch.arange(8) * (r.rank + 1) % 20, sparse
        convolution = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
        images = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(r.rank))
        yield convolution.to(memory_format=torch.channels_last), images, False

    for model, x, sparse in models():
        own = copy.deepcopy(model)
        if sparse:  # the sum of dense gradients: DDP leaves sparse ones sparse, which momentum refuses
            model[0].sparse = False
        ddp = DistributedDataParallel(model)
        for trained, optimizer in ((ddp, sgd(ddp)), (own, dist_opt(own))):
            for _ in range(3):
                optimizer.zero_grad()
                trained(x).square().mean().backward()
                optimizer.step()
        r.same_as_gloo(params_of(own), params_of(model), rtol=1e-4, atol=1e-5)
        assert [p.stride() for p in own.parameters()] == [p.stride() for p in model.parameters()]
    model = torch.nn.Linear(5, 1, bias=False)
    optimizer = dist_opt(model, clip=0.5)
    (model(torch.arange(5.0)) * (r.rank + 1)).sum().backward()
    same(model.weight.grad, torch.tensor([[0.0, 0.5, 0.5, 0.5, 0.5]]))
    assert optimizer.step(lambda: 7.0) == 7.0


def check_dist_opt_after_an_exception(r: Ranks) -> None:
    """A backward pass that raises on one rank: the others get an error that names it, and all go on together."""
    for set_to_none in (True, False):
        model = network()
        optimizer = dist_opt(model)
        train(model, optimizer, r.rank, 1)
        before, faulty = params_of(model), r.rank == r.size - 1
        (x, y), (u, v) = batches(r.rank, 2)
        optimizer.zero_grad(set_to_none)
        hidden = model[2](model[1](model[0](x)))
        if faulty:
            hidden.register_hook(_raise)
        loss = torch.nn.functional.cross_entropy(model[4](model[3](hidden)), y)
        with pytest.raises(ValueError if faulty else GradientError, match="" if faulty else f"rank {r.size - 1} "):
            loss.backward() if not faulty else _twice(loss, optimizer, model, u, v, set_to_none)
        if not faulty:
            optimizer.zero_grad(set_to_none)
            torch.nn.functional.cross_entropy(model(u), v).backward()
        optimizer.step()
        for one, other in zip(params_of(model), before, strict=True):
            same_on_all_ranks(one)
            assert bool(one.isfinite().all())
            assert not torch.equal(one, other)
        optimizer.close()


def check_dist_opt_of_thawed_parameters(r: Ranks) -> None:
    """Parameters that train later than others are those of rank 0, and averaged."""
    own, expected = network(), DistributedDataParallel(network(), find_unused_parameters=True)
    if r.rank:
        with torch.no_grad():
            next(own.parameters()).add_(1)  # replaced by that of rank 0
    own[0].requires_grad_(False)
    ours, theirs = dist_opt(own), sgd(expected)
    for first in range(3):
        if first == 1:
            own[0].requires_grad_(True)
        for x, y in batches(r.rank, 2, 2 * first):
            for model, optimizer in ((own, ours), (expected, theirs)):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                if not first and optimizer is theirs:
                    expected.module[0].zero_grad(set_to_none=True)
                optimizer.step()
    r.same_as_gloo(params_of(own), params_of(expected), rtol=1e-4, atol=1e-5)


class Backbone(torch.nn.Module):
    """A frozen part that the optimizer does not have, buffers of several types, and a head, which trains."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = torch.nn.Linear(6, 7).to(torch.bfloat16).requires_grad_(False), torch.nn.Linear(7, 3)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("flags", torch.tensor([seed > 0, True]))
        self.register_buffer("table", torch.randn(3, 4, dtype=torch.complex64).t())
        self.register_buffer("empty", torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.to(torch.bfloat16)).float())


def check_all_begins_as_on_rank_0(r: Ranks) -> None:
    for kind in ("names", "model", "diloco"):
        model = Backbone(r.rank)
        inner = torch.optim.SGD(model.head.parameters(), 0.1)
        if kind == "diloco":
            distopt.torch.DiLoCo(model, inner, torch.optim.SGD(model.head.parameters(), 0.7), sync_every=1)
        elif kind == "names":
            distopt.torch.DistOpt(inner, model.named_parameters())
        else:
            distopt.torch.DistOpt(inner, model=model)
        first = Backbone(0)
        for name, tensor in model.state_dict().items():
            if kind != "names" or name not in dict(model.named_buffers()):
                same_on_all_ranks(torch.view_as_real(tensor) if tensor.is_complex() else tensor, (kind, name))
                assert torch.equal(tensor, first.state_dict()[name]), (kind, name)


def check_dist_opt_of_unused_parameters(r: Ranks) -> None:
    """Branches that some ranks or passes leave out, against one process: weight decay leaves unused ones alone."""

    def backward(model: torch.nn.Module, rank: int, step: int, add: Callable[[], Any]) -> None:
        (x, y), (u, v) = batches(rank, 2, 2 * step)
        with add():
            (model[step % 4](x.flatten(1)) - y[:, None]).square().mean().backward()
        (model[(step // 2 + (rank if step > 3 else 0)) % 3](u.flatten(1)) - v[:, None]).square().mean().backward()

    for set_to_none in (True, False):
        torch.manual_seed(5)
        own = torch.nn.ModuleList([torch.nn.Linear(64, 1) for _ in range(4)])
        one = copy.deepcopy(own)
        ours = dist_opt(own, torch.optim.AdamW(own.parameters(), 0.01), find_unused_parameters=True)
        theirs = torch.optim.AdamW(one.parameters(), 0.01)
        for step in range(8):
            ours.zero_grad(set_to_none)
            backward(own, r.rank, step, ours.no_sync)
            ours.step()
            theirs.zero_grad(set_to_none)
            for rank in r.all:
                backward(one, rank, step, contextlib.nullcontext)
            for param in one.parameters():
                param.grad = None if param.grad is None else param.grad / r.size
            theirs.step()
        for found, expected in zip(own.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            same_on_all_ranks(found.detach())


def check_dist_opt_of_gradients_that_are_not_means(r: Ranks) -> None:
    model = network()
    optimizer = dist_opt(model)
    optimizer.step()  # without gradients
    (x, y), (u, v) = batches(r.rank, 2)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.step()  # with the same means
    with optimizer.no_sync():
        torch.nn.functional.cross_entropy(model(u), v).backward()
    before = params_of(model)
    with pytest.raises(UsageError, match=r"0.weight .* inside of no_sync, .* zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    grads = torch.autograd.grad(torch.nn.functional.cross_entropy(model(u), v), list(model.parameters()))
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad
    with pytest.raises(UsageError, match=r"0.weight comes from no backward pass .* DistOpt.optimizer"):
        optimizer.step()
    for param, kept in zip(model.parameters(), before, strict=True):
        same(param.detach(), kept)


def check_dist_opt_in_nested_backward_passes(r: Ranks) -> None:
    """Reentrant checkpointing, where also a whole model, and one with a parameter that is not used, is checkpointed."""
    for wholly in (False, True):
        model, own, unused = DistributedDataParallel(network()), network(), torch.nn.Linear(2, 2)
        theirs = sgd(model)
        both, nested = torch.nn.ModuleList([own, unused]), {"use_reentrant": True}
        ours = dist_opt(both, find_unused_parameters=True)
        for x, y in batches(r.rank, 3):
            for trained, optimizer in ((model.module, theirs), (own, ours)):
                optimizer.zero_grad()
                if trained is not own:
                    out = model(x)
                elif wholly:
                    out = checkpoint(own, x.requires_grad_(), **nested)
                else:
                    out = own[4](checkpoint(own[3], checkpoint(own[:3], x.requires_grad_(), **nested), **nested))
                torch.nn.functional.cross_entropy(out, y).backward()
                optimizer.step()
        r.same_as_gloo(params_of(own), params_of(model), rtol=1e-4, atol=1e-5)
        ours.close()


def check_dist_opt_under_compiled_autograd(r: Ranks) -> None:
    """It would leave the gradients of each rank in `.grad`; the step after the error is as if there had been none."""
    disturbed, undisturbed = network(), network()
    ours, theirs = dist_opt(disturbed), dist_opt(undisturbed)
    for x, y in batches(r.rank, 1):
        loss = torch.nn.functional.cross_entropy(disturbed(x), y)
        with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(UsageError, match="leave torch"):
            torch.compile(loss.backward, backend="eager")()
    train(disturbed, ours, r.rank, 2)
    train(undisturbed, theirs, r.rank, 2)
    for one, other in zip(params_of(disturbed), params_of(undisturbed), strict=True):
        same(one, other)
        same_on_all_ranks(one, "a parameter")
    ours.close()
    theirs.close()


def check_dist_opt_with_a_grad_scaler(r: Ranks) -> None:
    """An overflow on one rank makes the scalers of all ranks skip a step, and halves their scales."""
    for name, options in CODECS.items():
        model = network()
        optimizer = dist_opt(model, codec=codecs.create(name, **options), non_finite="skip")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        model[4].weight.register_hook(
            lambda grad, s=scaler: grad * (torch.inf if r.rank and s.get_scale() > 512 else 1)
        )
        for x, y in batches(r.rank, 3):
            optimizer.zero_grad()
            scaler.scale(torch.nn.functional.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert (scaler.get_scale(), optimizer.stats().skipped) == (512.0, 1), name
        for tensor in model.parameters():
            same_on_all_ranks(tensor, name)


def _raise(_: torch.Tensor) -> None:
    raise ValueError("in the middle of a backward pass")


def _twice(
    loss: torch.Tensor, optimizer: Any, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, set_to_none: bool
) -> None:
    """A backward pass that fails, and the next one; raises the error of the first."""
    try:
        loss.backward()
    except ValueError:
        optimizer.zero_grad(set_to_none)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        raise


def check_codec_states_resume(r: Ranks) -> None:
    """Saved and loaded in the middle, for objects made anew: the bits of the undisturbed run."""

    def of_dist_opt() -> tuple[torch.nn.Module, Any, dict[str, Any]]:
        model = network()
        optimizer = dist_opt(model, codec=codecs.create("top-k", ratio=0.05, error_feedback=True))
        return model, optimizer, {"model": model, "optimizer": optimizer}

    def of_hook() -> tuple[torch.nn.Module, Any, dict[str, Any]]:
        model, state = hooked("power-sgd", dist.group.WORLD, error_feedback=True)
        optimizer = sgd(model)
        return model, optimizer, {"model": model, "optimizer": optimizer, "hook": state}

    def of_diloco() -> tuple[torch.nn.Module, Any, dict[str, Any]]:
        model = network()
        inner, outer = sgd(model), torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
        codec = codecs.create("top-k", ratio=0.2, error_feedback=True)
        options = {"sync_every": 5, "fragment_sync_delay": 1, "codec": codec}  # the average of step 5 is under way
        local = distopt.torch.DiLoCo(model, inner, outer, **options)
        return model, inner, {"model": model, "optimizer": inner, "local": local}

    for make in (of_dist_opt, of_hook, of_diloco):
        model, optimizer, _ = make()
        train(model, optimizer, r.rank, 10)
        expected = params_of(model)
        model, optimizer, things = make()
        train(model, optimizer, r.rank, 5)
        file = io.BytesIO()
        torch.save({name: thing.state_dict() for name, thing in things.items()}, file)
        train(model, optimizer, r.rank, 2)
        model, optimizer, things = make()
        file.seek(0)
        for name, states in torch.load(file).items():
            things[name].load_state_dict(states)
        train(model, optimizer, r.rank, 5, 5)
        for one, other in zip(params_of(model), expected, strict=True):
            same(one, other, make.__name__)


def check_codec_states_in_memory_formats(r: Ranks) -> None:
    """Residuals have the shapes of parameters, whatever the format; all dimensions of a kernel are of one length."""
    codec = codecs.create("top-k", ratio=0.3, error_feedback=True)
    images = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(r.rank))

    def after_a_step(front: str, memory_format: torch.memory_format) -> tuple[Any, dict[str, torch.Tensor]]:
        torch.manual_seed(4)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3), torch.nn.Tanh(), torch.nn.Conv2d(3, 3, 3))
        trained, optimizer = model.to(memory_format=memory_format), sgd(model)
        if front == "hook":
            trained = DistributedDataParallel(model)
            states, function = distopt.torch.hook(trained, codec)
            trained.register_comm_hook(states, function)
        elif front == "local":
            states = distopt.torch.DiLoCo(model, optimizer, sgd(model), sync_every=1, codec=codec)
        else:
            optimizer = states = dist_opt(model, optimizer, codec=codec)
        trained(images).square().mean().backward()
        optimizer.step()
        return states, copy.deepcopy(residuals(states))

    for front in ("optimizer", "hook", "local"):
        (one, first), (other, second) = (
            after_a_step(front, each) for each in (torch.contiguous_format, torch.channels_last)
        )
        for key, tensor in first.items():
            torch.testing.assert_close(tensor, second[key], rtol=1e-3, atol=1e-6)
        other.load_state_dict(one.state_dict())
        for key, tensor in residuals(other).items():
            same(tensor, first[key], (front, key))


def residuals(states: Any) -> dict[str, torch.Tensor]:
    """The residuals that an object with `state_dict` keeps."""
    saved = states.state_dict()
    engine = saved["engine"] if "engine" in saved else saved["fragments"][0]["engine"]
    return {key: tensor for key, tensor in engine.items() if "/residual/" in key}


def check_diloco(r: Ranks) -> None:
    """Against one process that trains a copy of the model for each rank."""
    for fragments, delay, alpha in ((1, 0, 0.0), (2, 0, 0.0), (2, 1, 0.0), (2, 1, 0.5)):
        own = network()
        inner, outer = sgd(own), torch.optim.SGD(own.parameters(), 0.7, momentum=0.9, nesterov=True)
        local = distopt.torch.DiLoCo(
            *(own, inner, outer),
            sync_every=4,
            fragments=fragments,
            fragment_sync_delay=delay,
            fragment_update_alpha=alpha,
            bucket_elements=SMALL,
        )
        train(own, inner, r.rank, 9)
        local.close()
        for one, other in zip(params_of(own), _diloco(r, fragments, delay, alpha), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert local.steps == 9


def _diloco(r: Ranks, fragments: int, delay: int, alpha: float) -> list[torch.Tensor]:
    models = [network() for _ in r.all]
    inners = [sgd(model) for model in models]
    average = params_of(models[0])
    sizes = [param.numel() for param in average]
    # The first fragment ends nearest to the half of all elements.
    cut = min(range(1, len(sizes)), key=lambda k: abs(sum(sizes[:k]) - sum(sizes) / 2)) if fragments > 1 else len(sizes)
    parts = [range(cut), range(cut, len(sizes))][:fragments]
    outers = [torch.optim.SGD([average[k] for k in part], 0.7, momentum=0.9, nesterov=True) for part in parts]
    distance = 4 // fragments
    sent: dict[int, list[torch.Tensor]] = {}
    for step in range(1, 10):
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            train(model, inner, rank, 1, step - 1)
        if step % distance == 0:
            part = parts[(step // distance - 1) % fragments]
            changes = [[average[k] - params_of(model)[k] for k in part] for model in models]
            sent[step] = [torch.stack(each).mean(0) for each in zip(*changes, strict=True)]
        if step > delay and (step - delay) % distance == 0:
            number = ((step - delay) // distance - 1) % fragments
            for k, grad in zip(parts[number], sent[step - delay], strict=True):
                average[k].grad = grad
            outers[number].step()
            for model in models:
                with torch.no_grad():
                    for k in parts[number]:
                        own = list(model.parameters())[k]
                        own.copy_(alpha * own + (1 - alpha) * average[k])
    return params_of(models[r.rank])


def check_diloco_average(r: Ranks) -> None:
    """The mean of all ranks at every step, and training that does not notice; then the one model at the end."""
    for fragments, delay, codec in ((1, 0, "fp32"), (2, 1, "top-k")):
        ended = []
        for looks in (False, True):
            model = torch.nn.Sequential(network(), torch.nn.BatchNorm1d(10))
            inner, outer = sgd(model), torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
            local = distopt.torch.DiLoCo(
                *(model, inner, outer),
                sync_every=4,
                fragments=fragments,
                fragment_sync_delay=delay,
                codec=codecs.create(codec, **CODECS[codec]),
                bucket_elements=SMALL,
            )
            for step in range(9 if delay else 10):  # the last step but one, or two, is a multiple of sync_every
                train(model, inner, r.rank, 1, step)
                if looks:
                    _check_average(r, model, local.average(), everywhere=not delay and local.steps % 4 == 0)
            ended.append([tensor.clone() for tensor in model.state_dict().values()])
        for one, other in zip(*ended, strict=True):
            same(one, other, "training notices an average")
        model.load_state_dict(local.average())
        for tensor in model.state_dict().values():
            same_on_all_ranks(tensor)
        train(model, inner, r.rank, 3, step)  # over the next average
        local.close()
    if r.size == 1:
        return
    if r.rank == 0:
        local.steps += 1
    with pytest.raises(MismatchError, match=r"0\.0\.weight a"):
        local.average()


def _check_average(r: Ranks, model: torch.nn.Module, mean: dict[str, torch.Tensor], *, everywhere: bool) -> None:
    trained = {name for name, _ in model.named_parameters()}
    assert mean.keys() == model.state_dict().keys()
    if not everywhere and r.size > 1:
        assert any(not torch.equal(mean[name], tensor) for name, tensor in model.named_parameters())
    for name, tensor in model.state_dict().items():
        gathered = [torch.empty_like(tensor) for _ in r.all]
        dist.all_gather(gathered, tensor)
        if not tensor.is_floating_point():
            same(mean[name], gathered[0], name)
            continue
        same(mean[name], torch.stack(gathered).double().mean(0).to(tensor.dtype), name)
        if everywhere and name in trained:
            same(mean[name], tensor, name)


def check_diloco_skips_bad_changes(r: Ranks) -> None:
    model = network()
    inner, outer = sgd(model), torch.optim.SGD(model.parameters(), 0.7)
    local = distopt.torch.DiLoCo(model, inner, outer, sync_every=2, fragment_sync_delay=1, non_finite="skip")
    before = params_of(model)
    train(model, inner, r.rank, 1)
    if r.rank == r.size - 1:
        with torch.no_grad():
            next(model.parameters())[0] = float("nan")
    train(model, inner, r.rank, 1, 1)
    with pytest.raises(UsageError, match="an average is under way in step 2"):
        local.load_state_dict(local.state_dict())
    train(model, inner, r.rank, 1, 2)
    for one, other in zip(params_of(model), before, strict=True):
        same(one, other)
    assert (local.stats().steps, local.stats().skipped, local.steps) == (1, 1, 3)


def check_replaced_parameters(r: Ranks) -> None:
    """A model whose parameters `load_state_dict` has replaced, all of them or one, and optimizers of the old ones."""
    message = r"another parameter in place of {}\.weight, which the optimizer trains"

    def replaced(model: torch.nn.Module, only: str = "") -> torch.nn.Module:
        states = {key: value.clone() for key, value in model.state_dict().items() if key.startswith(only)}
        model.load_state_dict(states, strict=False, assign=True)
        return model

    for only, find_unused in (("", False), ("2", False), ("2", True)):
        model = network()
        optimizer = distopt.torch.DistOpt(sgd(model), model=model, find_unused_parameters=find_unused)
        with pytest.raises(UsageError, match=message.format(only or "0")):
            train(replaced(model, only), optimizer, r.rank, 1)
        optimizer.close()
        train(model, distopt.torch.DistOpt(sgd(model), model=model), r.rank, 1)
    inner = sgd(model)
    local = distopt.torch.DiLoCo(model, inner, sgd(model), sync_every=2)
    train(replaced(model), inner, r.rank, 1)
    with pytest.raises(UsageError, match=message.format("0")):
        train(model, inner, r.rank, 1)
    local.close()


def check_mistakes_with_codecs(r: Ranks) -> None:
    model = network()
    inner, outer = sgd(model), sgd(model)
    with pytest.raises(UsageError, match="5 fragments of 6 parameters"):
        distopt.torch.DiLoCo(model, inner, outer, sync_every=4, fragments=5)
    with pytest.raises(UsageError, match=r"fragment_sync_delay is 4; it must be an integer in 0 \.\.\. 3"):
        distopt.torch.DiLoCo(model, inner, outer, sync_every=4, fragment_sync_delay=4)
    with pytest.raises(UsageError, match="or the optimizer is of another model"):
        distopt.torch.DiLoCo(network(), inner, outer)
    for make in (
        lambda: distopt.torch.DistOpt(inner, model=model, shards=8),
        lambda: distopt.torch.hook(DistributedDataParallel(network()), shards=8),
    ):
        with (
            mock.patch("distopt.torch.training.averaging.device_of", return_value=torch.device("cuda:1")),
            pytest.raises(UsageError, match=r"shards=8: steps in shards run on CPUs, .* are on cuda:1"),
        ):
            make()
    with pytest.raises(UsageError, match=r"7 is not a codec"):
        dist_opt(network(), codec=7)
    with pytest.raises(UsageError, match=r"parameter weight is of torch\.bfloat16; codecs reduce float32"):
        dist_opt(torch.nn.Linear(2, 2, dtype=torch.bfloat16))
    with pytest.raises(UsageError, match=r"clip_grad_norm is -1; it must be a number in \(0, inf\]"):
        dist_opt(network(), clip_grad_norm=-1)
    with pytest.raises(UsageError, match="wraps an optimizer"):
        distopt.torch.DistOpt(network())
    with pytest.raises(UsageError, match="LBFGS computes several gradients"):
        distopt.torch.DistOpt(torch.optim.LBFGS(network().parameters()))
    with pytest.raises(UsageError, match="unknown codec 'topk'"):
        distopt.torch.hook(network(), "topk")
    model = network()
    optimizer = dist_opt(model)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be copied or pickled; save its state_dict"):
            copied(optimizer)
    hooked_ddp, _ = hooked("fp32", dist.group.WORLD)
    averaged = torch.optim.swa_utils.AveragedModel(hooked_ddp)
    averaged.update_parameters(hooked_ddp)
    same(params_of(averaged)[0], params_of(hooked_ddp)[0])
    with pytest.raises(UsageError, match="hook cannot be pickled; save the model inside of DDP"):
        pickle.dumps(hooked_ddp)
    with pytest.raises(StateError, match=r"have no engine, only state, param_groups; .* before it is wrapped"):
        optimizer.load_state_dict(optimizer.optimizer.state_dict())
    with pytest.raises(UsageError, match=r"instead of backward\(create_graph=True\)"):
        model(torch.ones(1, 1, 8, 8)).sum().backward(create_graph=True)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(UsageError, match="has other parameters than when it was wrapped"):
        model(torch.ones(1, 1, 8, 8)).sum().backward()
    optimizer.close()
    _check_changes_after_wrapping()
    with pytest.raises(UsageError, match="named_parameters lacks 6 of the optimizer's 6; "):
        distopt.torch.DistOpt(sgd(model), network().named_parameters())
    ddp = DistributedDataParallel(network())
    ddp.register_comm_hook(*distopt.torch.hook(network()))
    with pytest.raises(UsageError, match="make the hook of the model inside of DDP"):
        ddp(torch.ones(1, 1, 8, 8)).sum().backward()
    words = torch.nn.Sequential(torch.nn.EmbeddingBag(5, 3, sparse=True), torch.nn.Linear(3, 2))
    ddp = DistributedDataParallel(words)
    ddp.register_comm_hook(*distopt.torch.hook(words))
    with pytest.raises(UsageError, match=r"the gradient of 0\.weight is sparse, and codecs send dense ones"):
        ddp(torch.tensor([[r.rank, 4]])).sum().backward()
    for averaged in ({"named_parameters": ddp.named_parameters()}, {"model": ddp}):
        with pytest.raises(UsageError, match=r"DDP averages the gradients of this model itself; use hook"):
            distopt.torch.DistOpt(sgd(ddp), **averaged)
    sharded = fully_shard(network())
    with pytest.raises(UsageError, match=r"0.weight is a DTensor; FSDP2 averages"):
        dist_opt(sharded)
    with pytest.raises(UsageError, match="trains 4 parameters that are not averaged"):
        distopt.torch.DiLoCo(model, sgd(model), sgd(model[4]))
    model[0].requires_grad_(False)
    inner = sgd(model)
    local = distopt.torch.DiLoCo(model, inner, sgd(model))
    with pytest.raises(StateError, match="the states are of 0 fragments"):
        local.load_state_dict({})
    model[0].requires_grad_(True)
    with pytest.raises(UsageError, match="trains 2 parameters that are not averaged"):
        inner.step()
    local.close()
    inner, outer = sgd(model), sgd(model)
    local = distopt.torch.DiLoCo(model, inner, outer)
    model.double()
    with pytest.raises(UsageError, match=r"0.weight is torch.float64 on cpu now, and was torch.float32 on cpu when"):
        inner.step()
    model.float()
    outer.param_groups[0]["params"][2] = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UsageError, match=r"outer_optimizer has lost parameter 2\.weight"):
        inner.step()
    local.close()
    ddp = DistributedDataParallel(torch.nn.Conv2d(3, 3, 3))
    ddp.register_comm_hook(*distopt.torch.hook(ddp, "fp16"))
    ddp.to(memory_format=torch.channels_last)
    with pytest.raises(UsageError, match=r"weight of strides \(27, 1, 9, 3\) had another memory format when the hook"):
        ddp(torch.ones(1, 3, 4, 4)).sum().backward()
    # Cubic kernels: the arrays differ in nothing but the meaning of their dimensions.
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Conv2d(3, 3, 3))
    model.to(memory_format=torch.channels_last if r.rank == r.size - 1 else torch.contiguous_format)
    for wrapped in (lambda: dist_opt(model), lambda: distopt.torch.DiLoCo(model, sgd(model), sgd(model))):
        with pytest.raises(MismatchError, match=r"1\.weight .* in memory, which has .* \[0, 2, 3, 1\], .* same memory"):
            wrapped()
    model = torch.nn.Linear(3, 2 + (r.rank == r.size - 1))
    with pytest.raises(MismatchError, match=rf"rank {r.size - 1} "):
        dist_opt(model)
    model = network()
    params, first = list(model.parameters()), 2 + (r.rank == r.size - 1)
    groups = [{"params": params[:first], "weight_decay": 0.1}, {"params": params[first:]}]
    optimizer = dist_opt(model, torch.optim.SGD(groups, 0.1))
    with pytest.raises(MismatchError, match=r"number of params is 3 there, 2 on rank 0"):
        model(torch.ones(1, 1, 8, 8)).sum().backward()
    optimizer.close()
    model = network()
    optimizer = dist_opt(model, find_unused_parameters=r.rank == 0)
    with pytest.raises(MismatchError, match="unused para"):  # between hosts, labels are cut
        train(model, optimizer, r.rank, 2)
    optimizer.close()
    # A parameter that the loss does not reach.
    pair = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    optimizer = dist_opt(pair)
    with pytest.raises(UsageError, match=r"did not reach .* find_unused_parameters=True"):
        pair[0](torch.ones(1, 3)).sum().backward()
    optimizer.close()
    optimizer = dist_opt(pair, find_unused_parameters=True)
    another = dist_opt(pair)
    with pytest.raises(UsageError, match=r"parameter 0.weight is averaged by another DistOpt, too; call close"):
        pair[0](torch.ones(1, 3)).sum().backward()
    another.close()
    optimizer.zero_grad()
    pair[r.rank % 2](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for parameter in pair.parameters():
        same_on_all_ranks(parameter)


def _check_changes_after_wrapping() -> None:
    """Changes of a model after its optimizer was wrapped, with which gradients would not be averaged, or twice."""

    def replace(model: torch.nn.Module, optimizer: Any) -> Any:
        model[4].weight = optimizer.param_groups[0]["params"][4] = torch.nn.Parameter(model[4].weight.detach().clone())

    def replace_all(model: torch.nn.Module, optimizer: Any) -> Any:
        for name, tensor in list(model.named_parameters()):
            setattr(model.get_submodule(name[0]), name[2:], torch.nn.Parameter(tensor.detach().clone()))
        optimizer.param_groups[0]["params"] = list(model.parameters())

    def convert(model: torch.nn.Module, _: Any) -> Any:
        model.double().register_forward_pre_hook(lambda _, args: (args[0].double(),))

    def drop(model: torch.nn.Module, _: Any) -> Any:
        model[4].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    for change, words in {
        replace: "has other parameters than when it was wrapped",
        replace_all: "has other parameters than when it was wrapped",
        convert: "0.weight is torch.float64 on cpu now, and was torch.float32 on cpu when",
        drop: "a hook has dropped the gradient of 4.weight before it was averaged",
        lambda model, _: DistributedDataParallel(model): "DDP averages the gradients of this model itself",
    }.items():
        model = network()
        optimizer = dist_opt(model, find_unused_parameters=True)
        trained = change(model, optimizer) or model
        loss = trained(torch.ones(1, 1, 8, 8)).sum()

        def step(loss: torch.Tensor = loss, optimizer: Any = optimizer) -> None:
            loss.backward()
            optimizer.step()

        with pytest.raises(UsageError, match=words):
            step()
        optimizer.close()
    ddp = DistributedDataParallel(network())
    optimizer = distopt.torch.DistOpt(sgd(ddp))
    loss = ddp(torch.ones(1, 1, 8, 8)).sum()
    with pytest.raises(UsageError, match="DDP averages the gradients of this model itself"):
        loss.backward()
    optimizer.close()
