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

from .ddp import drawn, learn, loss_of, network
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
NEAR = {"rtol": 1e-4, "atol": 1e-5}  # where sums may have another order


def batches(rank: int, count: int, first: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(first, first + count):
        yield drawn(torch.Generator().manual_seed(100 * step + rank))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int = 5, first: int = 0) -> None:
    for step, data in enumerate(batches(rank, count, first)):
        learn(model, optimizer, data, set_to_none=step % 2 == 0)


def params_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in model.parameters()]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def outer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)


def dist_opt(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    options = {"bucket_elements": SMALL, **options}
    return distopt.torch.DistOpt(optimizer or sgd(model), model.named_parameters(), **options)


def hooked(model: torch.nn.Module, codec: Any, group: dist.ProcessGroup | None = None, **options: Any) -> tuple:
    """The model in DDP with a hook, and the hook's states."""
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.005)
    state, function = distopt.torch.hook(ddp, codec, group=group, bucket_elements=SMALL, **options)
    ddp.register_comm_hook(state, function)
    return ddp, state


def made(front: str, model: torch.nn.Module, codec: Any, **options: Any) -> tuple[torch.nn.Module, Any, Any]:
    """What to call, what steps, and what has the states, by this front; DiLoCo averages after every `sync_every`."""
    inner = sgd(model)
    if front == "hook":
        ddp, state = hooked(model, codec, **options)
        return ddp, inner, state
    if front == "dist_opt":
        optimizer = dist_opt(model, inner, codec=codec, **options)
        return model, optimizer, optimizer
    return model, inner, distopt.torch.DiLoCo(model, inner, outer_of(model), codec=codec, **options)


def created(name: str) -> Any:
    return codecs.create(name, **CODECS[name])


def check_codecs_of_hooks(r: Ranks) -> None:
    """The same bits over groups of distopt and of Gloo, as those of DistOpt, and on all ranks; as many bytes."""
    for name, options in CODECS.items():
        model = network()
        optimizer = dist_opt(model, codec=created(name))
        train(model, optimizer, r.rank)
        assert len(optimizer.stats().buckets) > 1
        for group in (dist.group.WORLD, r.gloo):
            ddp, state = hooked(network(), name, group, **options)
            train(ddp, sgd(ddp), r.rank)
            same(params_of(ddp), params_of(model), name)
            assert state.stats().total.wire_bytes == optimizer.stats().total.wire_bytes, name
        same_on_all_ranks(params_of(model), name)
        assert not torch.equal(params_of(model)[0], params_of(network())[0]), name


FRONTS = "hook", "dist_opt", "diloco"


def check_codecs_via_the_host(r: Ranks) -> None:
    """For parameters on a CPU, the same as without."""
    for front in FRONTS:
        options = {"sync_every": 2, "bucket_elements": SMALL} if front == "diloco" else {}
        ended = []
        for via_host in (False, True):
            model = network()
            called, optimizer, states = made(front, model, created("top-k"), via_host=via_host, **options)
            train(called, optimizer, r.rank)
            ended.append([*params_of(model), *residuals(states).values()])
        same(*ended, front)


def check_dist_opt_is_ddp(r: Ranks) -> None:
    rules: list[Callable[[torch.nn.Module], torch.optim.Optimizer]] = [
        sgd,
        lambda model: torch.optim.AdamW(model.parameters(), 0.01, foreach=True),
        lambda model: torch.optim.AdamW(model.parameters(), 0.01, fused=True),
    ]
    for rule in rules:
        model, own = DistributedDataParallel(network(), bucket_cap_mb=0.005), network()
        if r.rank:
            with torch.no_grad():  # replaced by those of rank 0
                next(own.parameters()).add_(1)
        theirs, ours = rule(model), dist_opt(own, rule(own), clip_grad_norm=None)
        schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (theirs, ours)]
        for first in range(4):
            train(model, theirs, r.rank, 2, first)
            train(own, ours, r.rank, 2, first)
            for schedule in schedules:
                schedule.step()
        r.same_as_gloo(params_of(own), params_of(model), **NEAR)
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def check_dist_opt_clips_what_it_steps_by(r: Ranks) -> None:
    """The norm of the gradients of two passes together, also when a GradScaler has unscaled them, against DDP."""
    for scales in (False, True):
        model, own = DistributedDataParallel(network()), network()
        theirs, ours = sgd(model), dist_opt(own, clip_grad_norm=0.05, non_finite="skip")
        for trained, optimizer in ((model, theirs), (own, ours)):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scales)
            for pair in zip(batches(r.rank, 3), batches(r.rank, 3, 3), strict=True):
                optimizer.zero_grad()
                for data in pair:
                    scaler.scale(loss_of(trained, data)).backward()
                scaler.unscale_(optimizer)
                if optimizer is theirs:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                scaler.step(optimizer)
                scaler.update()
        r.same_as_gloo(params_of(own), params_of(model), **NEAR)


def check_dist_opt_averages_what_hooks_have_made(r: Ranks) -> None:
    """Hooks of the script that change `.grad`, registered before DistOpt's or after them, against DDP.

    A model that is converted between steps, and back, is averaged, too.
    """

    def register(model: torch.nn.Module) -> None:
        for place, param in enumerate(model.parameters(), 1):
            param.register_post_accumulate_grad_hook(lambda p, place=place: setattr(p, "grad", p.grad * (place / 6)))

    for after in (False, True):
        model, own = network(), network()
        register(model)
        if not after:
            register(own)
        ddp, ours = DistributedDataParallel(model, bucket_cap_mb=0.005), dist_opt(own)
        if after:
            register(own)
        theirs = sgd(ddp)
        for count, first in ((5, 0), (3, 5)):
            train(ddp, theirs, r.rank, count, first)
            train(own, ours, r.rank, count, first)
            own.double().float()
        r.same_as_gloo(params_of(own), params_of(model), **NEAR)


def check_hooks_average_over_the_group_of_ddp(r: Ranks) -> None:
    """Each rank but the last in a group with the next one only; the hook is not told."""
    pairs = [dist.new_group([first, first + 1][: r.size - first]) for first in range(0, r.size, 2)]
    other, ours = (DistributedDataParallel(network(), process_group=pairs[r.rank // 2]) for _ in range(2))
    ours.register_comm_hook(*distopt.torch.hook(ours))
    for ddp in (other, ours):
        train(ddp, sgd(ddp), r.rank)
    torch.testing.assert_close(params_of(other), params_of(ours), **NEAR)
    if r.size > 2:
        text = r"DDP averages over the ranks \[.*\], and group= has others"
        refuses(text, distopt.torch.hook, ours, group=dist.group.WORLD)


def check_dist_opt_joins(r: Ranks) -> None:
    """Ranks with different numbers of batches, against one process: a step is the mean over those with data."""
    own, expected = network(), network()
    ours, theirs = dist_opt(own), sgd(expected)
    with ours.join():
        train(own, ours, r.rank, 2 + r.rank)
    every = [list(batches(rank, 2 + rank)) for rank in r.all]
    for step in range(1 + r.size):
        grads = []
        for data in [mine[step] for mine in every if step < len(mine)]:
            theirs.zero_grad()
            grads.append(torch.autograd.grad(loss_of(expected, data), list(expected.parameters())))
        for param, *parts in zip(expected.parameters(), *grads, strict=True):
            param.grad = torch.stack(parts).mean(0)
        theirs.step()
    torch.testing.assert_close(params_of(own), params_of(expected), **NEAR)
    same_on_all_ranks(params_of(own))


def check_dist_opt_updates_partially(r: Ranks) -> None:
    model = network()
    optimizer = dist_opt(model, partition_elements=SMALL)
    train(model, optimizer, r.rank, 1)
    (data,) = batches(r.rank, 1, 1)
    optimizer.zero_grad()
    loss_of(model, data).backward()
    grads = [param.grad.clone() for param in model.parameters()]
    optimizer.step()
    before = params_of(model)
    optimizer.synchronize()
    same([param.grad for param in model.parameters()], grads, "after a step, .grad is what it was")
    same_on_all_ranks(params_of(model))
    torch.testing.assert_close(params_of(model), [torch.stack(gathered(r, mine)).mean(0) for mine in before])
    assert any(not torch.equal(one, mine) for one, mine in zip(params_of(model), before, strict=True))


def gathered(r: Ranks, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Collective. Those of all ranks."""
    every = [torch.empty_like(tensor) for _ in r.all]
    dist.all_gather(every, tensor)
    return every


def check_bad_gradients(r: Ranks) -> None:
    """A step that a script leaves out after its GradientError, or that is skipped, has left no trace."""
    for front, non_finite in (("hook", "raise"), ("dist_opt", "raise"), ("dist_opt", "skip")):
        for codec in ("fp32", "top-k", codecs.TopK(0.1)):
            found = []
            for is_bad in (False, True):
                model, made_codec = network(), created(codec) if codec in CODECS else codec
                called, optimizer, _ = made(front, model, made_codec, non_finite=non_finite)
                train(called, optimizer, r.rank, 3)
                if is_bad:
                    ((x, y),) = batches(r.rank, 1, 9)
                    optimizer.zero_grad()
                    loss = loss_of(called, (x * torch.nan if r.rank == r.size - 1 else x, y))
                    if non_finite == "raise":
                        text = rf"step 3: .* rank {r.size - 1} .*lower the learning rate"
                        refuses(text, loss.backward, kind=GradientError)
                    else:
                        loss.backward()
                        optimizer.step()
                train(called, optimizer, r.rank, 2, 3)
                found.append(params_of(model))
            same(*found, (front, codec, non_finite))
            same_on_all_ranks(found[1])


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
        r.same_as_gloo(params_of(own), params_of(model), **NEAR)
        assert [p.stride() for p in own.parameters()] == [p.stride() for p in model.parameters()]
    model = torch.nn.Linear(5, 1, bias=False)
    optimizer = dist_opt(model, clip=0.5)
    (model(torch.arange(5.0)) * (r.rank + 1)).sum().backward()
    same(model.weight.grad, torch.tensor([[0.0, 0.5, 0.5, 0.5, 0.5]]))
    assert optimizer.step(lambda: 7.0) == 7.0


def check_dist_opt_after_an_exception(r: Ranks) -> None:
    """A backward pass that raises on one rank: the others get an error that names it, and all go on together."""

    def fail(_: torch.Tensor) -> None:
        raise ValueError("in the middle of a backward pass")

    for set_to_none in (True, False):
        model = network()
        optimizer = dist_opt(model)
        train(model, optimizer, r.rank, 1)
        before, faulty = params_of(model), r.rank == r.size - 1
        (x, y), good = batches(r.rank, 2)
        optimizer.zero_grad(set_to_none=set_to_none)
        hidden = model[2](model[1](model[0](x)))
        if faulty:
            hidden.register_hook(fail)

        def passes(model=model, optimizer=optimizer, data=(hidden, y), good=good, none=set_to_none) -> None:
            try:
                loss_of(model[3:], data).backward()
            finally:  # the next one, with the error under way
                optimizer.zero_grad(set_to_none=none)
                loss_of(model, good).backward()

        refuses("" if faulty else f"rank {r.size - 1} ", passes, kind=ValueError if faulty else GradientError)
        optimizer.step()
        same_on_all_ranks(params_of(model))
        for one, other in zip(params_of(model), before, strict=True):
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
        for data in batches(r.rank, 2, 2 * first):
            learn(own, ours, data)
            theirs.zero_grad()
            loss_of(expected, data).backward()
            if not first:
                expected.module[0].zero_grad(set_to_none=True)
            theirs.step()
    r.same_as_gloo(params_of(own), params_of(expected), **NEAR)


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


def check_all_begins_as_on_rank_0(r: Ranks) -> None:
    for kind in ("names", "model", "diloco"):
        model, first = Backbone(r.rank), Backbone(0)
        inner = sgd(model.head)
        if kind == "diloco":
            distopt.torch.DiLoCo(model, inner, sgd(model.head), sync_every=1)
        else:
            found = {"model": model} if kind == "model" else {"named_parameters": model.named_parameters()}
            distopt.torch.DistOpt(inner, **found)
        for name, tensor in model.state_dict().items():
            if kind != "names" or name not in dict(model.named_buffers()):
                same(tensor, first.state_dict()[name], (kind, name))


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
        torch.testing.assert_close(params_of(own), params_of(one), **NEAR)
        same_on_all_ranks(params_of(own))


def check_dist_opt_of_gradients_that_are_not_means(r: Ranks) -> None:
    model = network()
    optimizer = dist_opt(model)
    optimizer.step()  # without gradients
    first, second = batches(r.rank, 2)
    loss_of(model, first).backward()
    optimizer.step()
    optimizer.step()  # with the same means
    with optimizer.no_sync():
        loss_of(model, second).backward()
    before = params_of(model)
    refuses(r"0.weight .* inside of no_sync, .* zero_grad", optimizer.step)
    optimizer.zero_grad()
    grads = torch.autograd.grad(loss_of(model, second), list(model.parameters()))
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad
    refuses(r"0.weight comes from no backward pass .* DistOpt.optimizer", optimizer.step)
    same(params_of(model), before)


def check_dist_opt_in_nested_backward_passes(r: Ranks) -> None:
    """Reentrant checkpointing, where also a whole model, and one with a parameter that is not used, is checkpointed."""
    for wholly in (False, True):
        model, own, unused = DistributedDataParallel(network()), network(), torch.nn.Linear(2, 2)
        theirs = sgd(model)
        both, nested = torch.nn.ModuleList([own, unused]), {"use_reentrant": True}
        ours = dist_opt(both, find_unused_parameters=True)

        def recomputed(x: torch.Tensor, own: Any = own, wholly: bool = wholly, nested: Any = nested) -> torch.Tensor:
            if wholly:
                return checkpoint(own, x.requires_grad_(), **nested)
            return own[4](checkpoint(own[3], checkpoint(own[:3], x.requires_grad_(), **nested), **nested))

        for data in batches(r.rank, 3):
            learn(model, theirs, data)
            learn(recomputed, ours, data)
        r.same_as_gloo(params_of(own), params_of(model), **NEAR)
        ours.close()


def check_dist_opt_under_compiled_autograd(r: Ranks) -> None:
    """It would leave the gradients of each rank in `.grad`; the step after the error is as if there had been none."""
    disturbed, undisturbed = network(), network()
    ours, theirs = dist_opt(disturbed), dist_opt(undisturbed)
    for data in batches(r.rank, 1):
        loss = loss_of(disturbed, data)
        with torch._dynamo.config.patch(compiled_autograd=True):
            refuses("leave torch", torch.compile(loss.backward, backend="eager"))
    train(disturbed, ours, r.rank, 2)
    train(undisturbed, theirs, r.rank, 2)
    same(params_of(disturbed), params_of(undisturbed))
    same_on_all_ranks(params_of(disturbed), "a parameter")
    ours.close()
    theirs.close()


def check_dist_opt_with_a_grad_scaler(r: Ranks) -> None:
    """An overflow on one rank makes the scalers of all ranks skip a step, and halves their scales."""
    for name in CODECS:
        model = network()
        optimizer = dist_opt(model, codec=created(name), non_finite="skip")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        model[4].weight.register_hook(
            lambda grad, s=scaler: grad * (torch.inf if r.rank and s.get_scale() > 512 else 1)
        )
        for data in batches(r.rank, 3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, data)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert (scaler.get_scale(), optimizer.stats().skipped) == (512.0, 1), name
        same_on_all_ranks(params_of(model), name)


def check_codec_states_resume(r: Ranks) -> None:
    """Saved and loaded in the middle, for objects made anew: the bits of the undisturbed run."""
    top_k = {"ratio": 0.05, "error_feedback": True}

    def things(front: str) -> tuple[torch.nn.Module, Any, dict[str, Any]]:
        codec, options = codecs.create("power-sgd" if front == "hook" else "top-k", **kinds[front]), {}
        if front == "diloco":  # the average of step 5 is under way where states are saved
            options = {"sync_every": 5, "fragment_sync_delay": 1}
        called, optimizer, states = made(front, network(), codec, **options)
        return called, optimizer, {"model": called, "optimizer": optimizer, "states": states}

    kinds = {"dist_opt": top_k, "hook": {"error_feedback": True}, "diloco": top_k | {"ratio": 0.2}}
    for front in kinds:
        model, optimizer, _ = things(front)
        train(model, optimizer, r.rank, 10)
        expected = params_of(model)
        model, optimizer, saved = things(front)
        train(model, optimizer, r.rank, 5)
        file = io.BytesIO()
        torch.save({name: thing.state_dict() for name, thing in saved.items()}, file)
        train(model, optimizer, r.rank, 2)
        model, optimizer, loaded = things(front)
        file.seek(0)
        for name, states in torch.load(file).items():
            loaded[name].load_state_dict(states)
        train(model, optimizer, r.rank, 5, 5)
        same(params_of(model), expected, front)


def check_codec_states_in_memory_formats(r: Ranks) -> None:
    """Residuals have the shapes of parameters, whatever the format; all dimensions of a kernel are of one length."""
    codec = codecs.create("top-k", ratio=0.3, error_feedback=True)
    images = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(r.rank))

    def after_a_step(front: str, memory_format: torch.memory_format) -> tuple[Any, dict[str, torch.Tensor]]:
        torch.manual_seed(4)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3), torch.nn.Tanh(), torch.nn.Conv2d(3, 3, 3))
        options = {"sync_every": 1} if front == "diloco" else {}
        called, optimizer, states = made(front, model.to(memory_format=memory_format), codec, **options)
        called(images).square().mean().backward()
        optimizer.step()
        return states, copy.deepcopy(residuals(states))

    for front in FRONTS:
        one, first = after_a_step(front, torch.contiguous_format)
        other, second = after_a_step(front, torch.channels_last)
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-6)
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
        inner, options = sgd(own), {"sync_every": 4, "fragments": fragments, "bucket_elements": SMALL}
        options |= {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
        local = distopt.torch.DiLoCo(own, inner, outer_of(own), **options)
        train(own, inner, r.rank, 9)
        local.close()
        torch.testing.assert_close(params_of(own), _diloco(r, fragments, delay, alpha), **NEAR)
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
            inner, options = sgd(model), {"sync_every": 4, "fragments": fragments, "fragment_sync_delay": delay}
            options |= {"codec": created(codec), "bucket_elements": SMALL}
            local = distopt.torch.DiLoCo(model, inner, outer_of(model), **options)
            for step in range(9 if delay else 10):  # the last step but one, or two, is a multiple of sync_every
                train(model, inner, r.rank, 1, step)
                if looks:
                    _check_average(r, model, local.average(), everywhere=not delay and local.steps % 4 == 0)
            ended.append([tensor.clone() for tensor in model.state_dict().values()])
        same(*ended, "training notices an average")
        model.load_state_dict(local.average())
        same_on_all_ranks(model.state_dict().values())
        train(model, inner, r.rank, 3, step)  # over the next average
        local.close()
    if r.size > 1:
        local.steps += r.rank == 0
        refuses(r"0\.0\.weight a", local.average, kind=MismatchError)


def _check_average(r: Ranks, model: torch.nn.Module, mean: dict[str, torch.Tensor], *, everywhere: bool) -> None:
    trained = {name for name, _ in model.named_parameters()}
    assert mean.keys() == model.state_dict().keys()
    if not everywhere and r.size > 1:
        assert any(not torch.equal(mean[name], tensor) for name, tensor in model.named_parameters())
    for name, tensor in model.state_dict().items():
        every = gathered(r, tensor)
        if not tensor.is_floating_point():
            same(mean[name], every[0], name)
            continue
        same(mean[name], torch.stack(every).double().mean(0).to(tensor.dtype), name)
        if everywhere and name in trained:
            same(mean[name], tensor, name)


def check_diloco_skips_bad_changes(r: Ranks) -> None:
    model = network()
    inner = sgd(model)
    local = distopt.torch.DiLoCo(model, inner, sgd(model), sync_every=2, fragment_sync_delay=1, non_finite="skip")
    before = params_of(model)
    train(model, inner, r.rank, 1)
    if r.rank == r.size - 1:
        with torch.no_grad():
            next(model.parameters())[0] = float("nan")
    train(model, inner, r.rank, 1, 1)
    refuses("an average is under way in step 2", local.load_state_dict, local.state_dict())
    train(model, inner, r.rank, 1, 2)
    same(params_of(model), before)
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
        refuses(message.format(only or "0"), train, replaced(model, only), optimizer, r.rank, 1)
        optimizer.close()
        train(model, distopt.torch.DistOpt(sgd(model), model=model), r.rank, 1)
    inner = sgd(model)
    local = distopt.torch.DiLoCo(model, inner, sgd(model), sync_every=2)
    train(replaced(model), inner, r.rank, 1)
    refuses(message.format("0"), train, model, inner, r.rank, 1)
    local.close()


# -- mistakes ----------------------------------------------------------------------------------------------------------
ONES = torch.ones(1, 1, 8, 8)


def refuses(
    text: str, call: Callable[..., object], *args: Any, kind: type[Exception] = UsageError, **named: Any
) -> None:
    """The call raises an error of this kind with this text."""
    with pytest.raises(kind, match=text):
        call(*args, **named)


def backward(model: torch.nn.Module, x: torch.Tensor = ONES, **options: bool) -> None:
    model(x).sum().backward(**options)


def with_hook(model: torch.nn.Module, of: torch.nn.Module | None = None, *codec: str) -> DistributedDataParallel:
    """DDP with the hook of DDP, or of another model."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(*distopt.torch.hook(ddp if of is None else of, *codec))
    return ddp


def check_arguments_that_are_refused(r: Ranks) -> None:
    make, diloco, hook = distopt.torch.DistOpt, distopt.torch.DiLoCo, distopt.torch.hook
    model, pair = network(), torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    inner, outer = sgd(model), sgd(model)
    ddp, sharded = DistributedDataParallel(network()), fully_shard(network())
    refuses("5 fragments of 6 parameters", diloco, model, inner, outer, sync_every=4, fragments=5)
    delay = {"sync_every": 4, "fragment_sync_delay": 4}
    refuses(r"fragment_sync_delay is 4; it must be an integer in 0 \.\.\. 3", diloco, model, inner, outer, **delay)
    refuses("or the optimizer is of another model", diloco, network(), inner, outer)
    refuses("trains 4 parameters that are not averaged", diloco, model, sgd(model), sgd(model[4]))
    with mock.patch("distopt.torch.training.averaging.device_of", return_value=torch.device("cuda:1")):
        text = r"shards=8: steps in shards run on CPUs, .* are on cuda:1"
        refuses(text, make, inner, model=model, shards=8)
        refuses(text, hook, ddp, shards=8)
    refuses(r"7 is not a codec", dist_opt, model, codec=7)
    refuses(r"parameter weight is of torch\.bfloat16; codecs reduce float32", dist_opt, pair)
    refuses(r"clip_grad_norm is -1; it must be a number in \(0, inf\]", dist_opt, model, clip_grad_norm=-1)
    refuses("wraps an optimizer", make, network())
    refuses("LBFGS computes several gradients", make, torch.optim.LBFGS(model.parameters()))
    refuses("unknown codec 'topk'", hook, model, "topk")
    refuses("named_parameters lacks 6 of the optimizer's 6; ", make, sgd(model), network().named_parameters())
    for averaged in ({"named_parameters": ddp.named_parameters()}, {"model": ddp}):
        refuses(r"DDP averages the gradients of this model itself; use hook", make, sgd(ddp), **averaged)
    refuses(r"0.weight is a DTensor; FSDP2 averages", dist_opt, sharded)


def check_copies_and_states_that_are_refused(r: Ranks) -> None:
    model = network()
    optimizer = dist_opt(model)
    for copied in (copy.deepcopy, pickle.dumps):
        refuses("cannot be copied or pickled; save its state_dict", copied, optimizer)
    ddp, _ = hooked(network(), "fp32")
    averaged = torch.optim.swa_utils.AveragedModel(ddp)
    averaged.update_parameters(ddp)
    same(params_of(averaged), params_of(ddp))
    refuses("hook cannot be pickled; save the model inside of DDP", pickle.dumps, ddp)
    text = r"have no engine, only state, param_groups; .* before it is wrapped"
    refuses(text, optimizer.load_state_dict, optimizer.optimizer.state_dict(), kind=StateError)
    optimizer.close()
    local = distopt.torch.DiLoCo(model, sgd(model), sgd(model))
    refuses("the states are of 0 fragments", local.load_state_dict, {}, kind=StateError)
    local.close()


def check_gradients_that_are_refused(r: Ranks) -> None:
    model = network()
    optimizer = dist_opt(model)
    refuses(r"instead of backward\(create_graph=True\)", backward, model, create_graph=True)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    refuses("has other parameters than when it was wrapped", backward, model)
    refuses("make the hook of the model inside of DDP", backward, with_hook(network(), network()))
    words = torch.nn.Sequential(torch.nn.EmbeddingBag(5, 3, sparse=True), torch.nn.Linear(3, 2))
    text = r"the gradient of 0\.weight is sparse, and codecs send dense ones"
    refuses(text, backward, with_hook(words, words), torch.tensor([[r.rank, 4]]))
    ddp = with_hook(torch.nn.Conv2d(3, 3, 3), None, "fp16")
    ddp.to(memory_format=torch.channels_last)
    text = r"weight of strides \(27, 1, 9, 3\) had another memory format when the hook"
    refuses(text, backward, ddp, torch.ones(1, 3, 4, 4))


def check_changes_under_diloco(r: Ranks) -> None:
    model = network()
    model[0].requires_grad_(False)
    inner = sgd(model)
    local = distopt.torch.DiLoCo(model, inner, sgd(model))
    model[0].requires_grad_(True)
    refuses("trains 2 parameters that are not averaged", inner.step)
    local.close()
    inner, outer = sgd(model), sgd(model)
    local = distopt.torch.DiLoCo(model, inner, outer)
    model.double()
    refuses(r"0.weight is torch.float64 on cpu now, and was torch.float32 on cpu when", inner.step)
    model.float()
    outer.param_groups[0]["params"][2] = torch.nn.Parameter(torch.ones(3))
    refuses(r"outer_optimizer has lost parameter 2\.weight", inner.step)
    local.close()


def check_ranks_that_differ(r: Ranks) -> None:
    last = r.rank == r.size - 1
    # Cubic kernels: the arrays differ in nothing but the meaning of their dimensions.
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Conv2d(3, 3, 3))
    model.to(memory_format=torch.channels_last if last else torch.contiguous_format)
    text = r"1\.weight .* in memory, which has .* \[0, 2, 3, 1\], .* same memory"
    refuses(text, dist_opt, model, kind=MismatchError)
    refuses(text, distopt.torch.DiLoCo, model, sgd(model), sgd(model), kind=MismatchError)
    refuses(rf"rank {r.size - 1} ", dist_opt, torch.nn.Linear(3, 2 + last), kind=MismatchError)
    model = network()
    params = list(model.parameters())
    groups = [{"params": params[: 2 + last], "weight_decay": 0.1}, {"params": params[2 + last :]}]
    optimizer = dist_opt(model, torch.optim.SGD(groups, 0.1))
    refuses(r"number of params is 3 there, 2 on rank 0", backward, model, kind=MismatchError)
    optimizer.close()
    optimizer = dist_opt(model, find_unused_parameters=r.rank == 0)
    # Between hosts, labels are cut.
    refuses("unused para", train, model, optimizer, r.rank, 2, kind=MismatchError)


def check_parameters_that_the_loss_does_not_reach(r: Ranks) -> None:
    pair = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    optimizer, ones = dist_opt(pair), torch.ones(1, 3)
    refuses(r"did not reach .* find_unused_parameters=True", backward, pair[0], ones)
    optimizer.close()
    optimizer, another = dist_opt(pair, find_unused_parameters=True), dist_opt(pair)
    refuses(r"parameter 0.weight is averaged by another DistOpt, too; call close", backward, pair[0], ones)
    another.close()
    optimizer.zero_grad()
    backward(pair[r.rank % 2], ones)
    optimizer.step()
    same_on_all_ranks(params_of(pair))


def check_changes_after_wrapping(r: Ranks) -> None:
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

    def step(model: torch.nn.Module, optimizer: Any) -> None:
        backward(model)
        optimizer.step()

    for change, words in {
        replace: "has other parameters than when it was wrapped",
        replace_all: "has other parameters than when it was wrapped",
        convert: "0.weight is torch.float64 on cpu now, and was torch.float32 on cpu when",
        drop: "a hook has dropped the gradient of 4.weight before it was averaged",
        lambda model, _: DistributedDataParallel(model): "DDP averages the gradients of this model itself",
    }.items():
        model = network()
        optimizer = dist_opt(model, find_unused_parameters=True)
        refuses(words, step, change(model, optimizer) or model, optimizer)
    ddp = DistributedDataParallel(network())
    optimizer = distopt.torch.DistOpt(sgd(ddp))
    refuses("DDP averages the gradients of this model itself", backward, ddp)
    optimizer.close()
