"""The time of the GPU kernels and of a training step, against a copy, other libraries and the bare collective.

    python -m benchmarks gpu                        everything on one GPU
    python -m benchmarks gpu --only cnn resnet      training steps
    python -m benchmarks gpu --np 2                 all-reduce too, on as many GPUs
    python -m benchmarks gpu --write docs/results/gpu.md    puts the table between the marks in that file

Times are those of the device, between two events: the median of several rounds, in which both sides take turns. What a
row is compared with, and must hold, stands in the row. A kernel is compared with a copy of as many bytes as it must read
and write in all. Rows that need PyTorch with CUDA are left out without it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from distopt import device, launch, opt
from distopt.cli.values import at_least
from distopt.errors import MissingDependencyError
from distopt.kernels.discovery import find_cupy

from .models import compiled, resnet, sgd
from .output import put, table

ELEMENTS = 100_000_000
ADAM = 1e-6, 0.9, 0.999, 1e-8, 0.0  # learning rate, betas, epsilon, weight decay
SELECTED_FROM = 25_600_000
BATCH = 64


def device_ms(cupy, *calls, rounds: int = 9, repeats: int = 5) -> list[float]:
    """Median time of each call; the calls take turns."""
    times = [[] for _ in calls]
    for round_ in range(rounds + 2):
        for call, own in zip(calls, times, strict=True):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            for _ in range(repeats):
                call()
            stop.record()
            stop.synchronize()
            if round_ >= 2:  # two to warm up
                own.append(cupy.cuda.get_elapsed_time(start, stop) / repeats)
    return [statistics.median(own) for own in times]


def copy_of(cupy, n_bytes: int):
    """A call that moves `n_bytes` in all, read and written together."""
    source, target = cupy.zeros(max(n_bytes // 8, 1), cupy.float32), cupy.empty(max(n_bytes // 8, 1), cupy.float32)
    return lambda: cupy.copyto(target, source)


def ceiling_rows(cupy, n: int) -> Iterator[str]:
    """The bandwidth of the device's memory."""
    x = cupy.ones(n, cupy.float32)
    calls = {
        "copy": (8 * n, copy_of(cupy, 8 * n)),
        "read (sum)": (4 * n, lambda: cupy.sum(x)),
        "write (fill)": (4 * n, lambda: x.fill(2)),
    }
    for name, (n_bytes, call) in calls.items():
        (own,) = device_ms(cupy, call)
        yield f"| {name}, {n:,} elements | {own:.3f} ms | | {n_bytes / own / 1e6:,.0f} GB/s | |"


def kernel_calls(cupy, n: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Casts, selection, sparse sum, norm and updates, with the bytes that they must move."""
    from distopt.kernels import FINDINGS, Accumulation
    from distopt.kernels import gpu as codec
    from distopt.nn.numerics import gpu as ops

    x = cupy.random.default_rng(0).standard_normal(n, dtype=cupy.float32)
    wire, findings = cupy.empty(n, cupy.uint16), cupy.full(FINDINGS, -1, cupy.int64)
    none = Accumulation()
    k = max(n // 100, 1)
    lists = codec.new_lists(2 * k)
    indices = cupy.arange(0, n, 100, dtype=cupy.int32)[:k]
    values, dense = cupy.ones(indices.size, cupy.float32), cupy.zeros(n, cupy.float32)
    grad, first, second = cupy.ones_like(x), cupy.zeros_like(x), cupy.zeros_like(x)
    # The values that are selected, or summed, come with an index of 4 bytes each.
    return {
        "cast to float16": (6 * n, lambda: codec.encode16(x, (None, None), wire, "float16", 1.0, 65504.0, findings)),
        "cast to bfloat16": (6 * n, lambda: codec.encode16(x, (None, None), wire, "bfloat16", 1.0, 3e38, findings)),
        "cast from float16": (6 * n, lambda: codec.decode16(wire, dense, "float16", 1.0)),
        "threshold select, 1 %": (4 * n + 8 * k, lambda: codec.threshold(x, 2.5758, none, lists, findings)),
        "exact top-K, 1 %": (4 * n + 8 * k, lambda: codec.top_k(x, k, none, lists, findings)),
        "sparse sum of 1 %": (4 * n + 8 * k, lambda: codec.scatter_sum(dense, [indices], [values], 0, n)),
        "squared norm": (4 * n, lambda: codec.squared_norm(x)),
        "ReLU": (8 * n, lambda: ops.relu(x)),
        "SGD with momentum": (20 * n, lambda: ops.update("sgd", [(x, grad, [first])], 1e-6, 0.9, 0.0, 0.0, False)),
        "Adam": (28 * n, lambda: ops.update("adam", [(x, grad, [first, second])], 1, *ADAM)),
    }


def kernel_rows(cupy, n: int) -> Iterator[str]:
    """Each of `kernel_calls` against a copy of its bytes."""
    for name, (n_bytes, call) in kernel_calls(cupy, n).items():
        own, copied = device_ms(cupy, call, copy_of(cupy, n_bytes))
        yield f"| {name}, {n:,} elements | {own:.3f} ms | a copy of the same bytes | {copied / own:.0%} of it | 80 % |"


def select_rows(cupy, torch, n: int) -> Iterator[str]:
    """Exact top 1 % against other libraries."""
    from distopt.kernels import FINDINGS, Accumulation
    from distopt.kernels import gpu as codec

    x = cupy.random.default_rng(1).standard_normal(n, dtype=cupy.float32)
    k = n // 100
    lists, findings = codec.new_lists(k), cupy.full(FINDINGS, -1, cupy.int64)
    calls = {
        "": lambda: codec.top_k(x, k, Accumulation(), lists, findings),
        "cupy.argpartition": lambda: cupy.argpartition(cupy.abs(x), n - k),
    }
    if torch is not None:
        y = torch.as_tensor(x, device="cuda")
        calls["torch.topk"] = lambda: torch.topk(y.abs(), k)
    own, *others = device_ms(cupy, *calls.values(), repeats=2)
    for name, other in zip([*calls][1:], others, strict=True):
        yield f"| exact top 1 % of {n:,} | {own:.3f} ms | {name}, {other:.3f} ms | {other / own:.1f}x | 5x torch.topk |"


def torch_step(torch, net, shape: tuple[int, ...], classes: int, mode: str):
    """A call that trains `net` on a batch of `shape`, compiled in `mode` or, if that is "eager", not."""
    net = net.cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-5)
    x, y = torch.randn(*shape, device="cuda"), torch.randint(0, classes, shape[:1], device="cuda")
    forward = net if mode == "eager" else torch.compile(net, mode=mode)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(forward(x), y).backward()
        optimizer.step()

    return step


# How PyTorch runs: compiled in a mode, and whether both compute products and convolutions in TF32.
PEERS = (("eager", False), ("eager", True), ("default", False), ("reduce-overhead", False), ("reduce-overhead", True))


def set_tf32(torch, tf32: bool) -> None:
    """Have products and convolutions of both libraries in TF32, or in float32."""
    if torch is not None:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    os.environ["CUPY_TF32"] = str(int(tf32))


def step_rows(cupy, torch, peers, name: str, ours, theirs, shape: tuple[int, ...], classes: int) -> Iterator[str]:
    """Steps of ours(use_graph), with and without CUDA graphs, and of the network theirs() in PyTorch."""
    what = f"| {name} step, batch {shape[0]}"
    set_tf32(torch, False)
    step = ours(False)
    (about,) = device_ms(cupy, step, rounds=1, repeats=1)
    repeats = min(20, max(2, int(200 / about)))  # of a long step fewer: a machine may be lent for minutes
    (own,) = device_ms(cupy, step, repeats=repeats)
    yield f"{what}: {shape[0] / own * 1e3:,.0f} images/s | {own:.3f} ms | | | |"
    # Alone, as the wish for graphs is the device's; `step` has been measured by now.
    (replayed,) = device_ms(cupy, ours(True), repeats=repeats)
    device.create_cuda_gpu().EnableGraph(False)
    yield (
        f"{what}, CUDA graphs: {shape[0] / replayed * 1e3:,.0f} images/s | {replayed:.3f} ms | without, {own:.3f} ms | "
        f"{own / replayed:.2f}x | |"
    )
    for mode, tf32 in PEERS if torch is not None else ():
        if ("eager" if mode == "eager" else "compiled") not in peers:
            continue
        set_tf32(torch, tf32)
        peer = torch_step(torch, theirs(), shape, classes, mode)
        # Streams of two libraries: one call at a time, and PyTorch on CuPy's stream.
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            own, other = device_ms(cupy, step, peer, repeats=repeats)
        peer_name = f"PyTorch {'compiled, ' if mode != 'eager' else ''}{mode}"
        must, numbers = "1x" if mode == "eager" else "", ", both TF32" if tf32 else ""
        yield f"{what}{numbers} | {own:.3f} ms | {peer_name}, {other:.3f} ms | {other / own:.2f}x | {must} |"


def cnn_rows(cupy, torch, peers) -> Iterator[str]:
    def ours(use_graph: bool):
        cnn, x, y = compiled(opt.DistOpt(sgd()), BATCH, use_graph=use_graph)
        return lambda: cnn(x, y)

    def theirs():
        from .peers.ranks.networks_torch import build

        return build("cnn")

    return step_rows(cupy, torch, peers, "CNN", ours, theirs, (BATCH, 1, 28, 28), 10)


def resnet_rows(cupy, torch, peers, batch_size: int, size: int) -> Iterator[str]:
    shape = (batch_size, 3, size, size)
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal(shape, dtype=np.float32), rng.integers(0, 1000, batch_size).astype(np.int32)

    def ours(use_graph: bool):
        net, x, y = compiled(opt.DistOpt(sgd()), (images, labels), use_graph=use_graph, net=resnet(size=size))
        return lambda: net(x, y)

    def theirs():
        from .peers.ranks.networks_torch import build

        return build("resnet50")

    return step_rows(cupy, torch, peers, "ResNet-50", ours, theirs, shape, 1000)


SECTIONS = ("ceilings", "kernels", "select", "cnn", "resnet")


def reduce_rows(rank: int, world_size: int, file: str) -> None:
    """Collective. DistOpt's communicator against ncclAllReduce called by CuPy."""
    import cupy
    from cupy.cuda import nccl

    communicator = opt.DistOpt(opt.SGD()).communicator
    if communicator.name != "nccl":
        sys.exit(f"the {communicator.name} communicator was chosen; set DISTOPT_TRANSPORT=nccl to see what is missing")
    unique = nccl.get_unique_id() if rank == 0 else None
    payload = communicator.all_gather_bytes(json.dumps(unique).encode())[0]
    bare = nccl.NcclCommunicator(world_size, tuple(json.loads(payload)), rank)
    rows = []
    for n_bytes in (1 << 20, 16 << 20, 100 << 20, 400 << 20):
        array = communicator.empty(n_bytes // 4)
        array.fill(1e-20)
        stream = cupy.cuda.get_current_stream().ptr
        own, other = device_ms(
            cupy,
            lambda a=array: communicator.all_reduce(a).wait(),
            lambda a=array, s=stream: bare.allReduce(
                a.data.ptr, a.data.ptr, a.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, s
            ),
        )
        must = "5 %" if n_bytes >= 16 << 20 else ""
        rows.append(
            f"| all-reduce of {n_bytes >> 20} MiB, {world_size} GPUs | {own:.3f} ms | ncclAllReduce, {other:.3f} ms | "
            f"{own / other - 1:+.1%} | {must} |"
        )
    if rank == 0:
        Path(file).write_text("\n".join(rows))
    communicator.barrier()


def versions(cupy, torch) -> str:
    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(runtime.getDevice())["name"].decode()
    driver, cuda = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    others = f", PyTorch {torch.__version__}" if torch is not None else ""
    return f"{name}, driver for CUDA {driver // 1000}.{driver % 1000 // 10}, CUDA {cuda // 1000}.{cuda % 1000 // 10}, CuPy {cupy.__version__}{others}"


def find_torch():
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--np", type=at_least(1), default=1, metavar="N", help="GPUs for all-reduce (1)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS], help="sections of the table (all)")
    kinds = ("eager", "compiled")
    parser.add_argument("--peers", nargs="+", choices=kinds, default=[*kinds], help="PyTorch's steps (both kinds)")
    parser.add_argument("--elements", type=at_least(100), default=ELEMENTS, metavar="N", help="of ceilings and kernels")
    parser.add_argument("--selected-from", type=at_least(100), default=SELECTED_FROM, metavar="N", help="of top-K")
    parser.add_argument("--images", type=at_least(1), default=32, metavar="N", help="ResNet-50's batch (32)")
    parser.add_argument("--size", type=at_least(32), default=224, metavar="PIXELS", help="of its images (224)")
    parser.add_argument("--write", metavar="FILE", help="put the table between its marks in this file")


def run(args: argparse.Namespace) -> None:
    cupy, missing = find_cupy()
    if cupy is None:
        raise MissingDependencyError(f"the benchmark measures on a GPU: {missing}")
    device.create_cuda_gpu()
    torch = find_torch()
    sections = {
        "ceilings": partial(ceiling_rows, cupy, args.elements),
        "kernels": partial(kernel_rows, cupy, args.elements),
        "select": partial(select_rows, cupy, torch, args.selected_from),
        "cnn": partial(cnn_rows, cupy, torch, args.peers),
        "resnet": partial(resnet_rows, cupy, torch, args.peers, args.images, args.size),
    }
    lines = [versions(cupy, torch), "", *table(["what", "time", "against", "result", "must hold"], []).splitlines()]
    print("\n".join(lines), flush=True)
    for row in (row for name in args.only for row in sections[name]()):
        print(row, flush=True)  # a later one may fail or hang
        lines.append(row)
    if args.np > 1:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows")
            launch.spawn(reduce_rows, args.np, (str(file),))
            rows = file.read_text().splitlines()
        print("\n".join(rows))
        lines += rows
    if args.write:
        put(Path(args.write), "gpu", "\n".join(lines))
