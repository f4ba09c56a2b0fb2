"""What the GPU kernels and a training step cost, against a copy, other libraries and the bare collective.

    python -m benchmarks gpu                        kernels and the CNN, on one GPU
    python -m benchmarks gpu --np 2                 all-reduce too, on as many GPUs
    python -m benchmarks gpu --write docs/gpu.md    puts the table between the marks in that file

Times are those of the device, between two events: the median of several rounds, in which both sides take turns. What a
row is compared with, and must hold, stands in the row. Rows that need PyTorch with CUDA are left out without it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

from distopt import launch, opt
from distopt.cli.values import at_least
from distopt.errors import MissingDependencyError
from distopt.nn import device

from .models.cnn import compiled, sgd
from .output import put, table

ELEMENTS = 100_000_000
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
    source, target = cupy.empty(n_bytes // 8, cupy.float32), cupy.empty(n_bytes // 8, cupy.float32)
    return lambda: cupy.copyto(target, source)


def bandwidth_rows(cupy, n: int) -> list[str]:
    """Casts, selection, sparse sum and update, against a copy of as many bytes."""
    from distopt.kernels import FINDINGS, Accumulation
    from distopt.kernels import gpu as codec
    from distopt.nn.kernels import gpu as ops

    x = cupy.random.default_rng(0).standard_normal(n, dtype=cupy.float32)
    wire, findings = cupy.empty(n, cupy.uint16), cupy.full(FINDINGS, -1, cupy.int64)
    none = Accumulation()
    k = n // 100
    lists = codec.new_lists(2 * k)
    indices = cupy.arange(0, n, 100, dtype=cupy.int32)[:k]
    values, dense = cupy.ones(indices.size, cupy.float32), cupy.zeros(n, cupy.float32)
    grad, momentum = cupy.ones_like(x), cupy.zeros_like(x)
    cases = {
        "cast to float16": (6 * n, lambda: codec.encode16(x, None, wire, "float16", 1.0, 65504.0, findings)),
        "cast to bfloat16": (6 * n, lambda: codec.encode16(x, None, wire, "bfloat16", 1.0, 3e38, findings)),
        "cast from float16": (6 * n, lambda: codec.decode16(wire, x, "float16", 1.0)),
        "threshold select, 1 %": (4 * n, lambda: codec.threshold(x, 2.5758, none, lists, findings)),
        "exact top-K, 1 %": (4 * n, lambda: codec.top_k(x, k, none, lists, findings)),
        "sparse sum of 1 %": (16 * k, lambda: codec.scatter_sum(dense, [indices], [values], 0, n)),
        "SGD with momentum": (20 * n, lambda: ops.update("sgd", x, grad, [momentum], 1e-6, 0.9, 0.0, 0.0, False)),
    }
    rows = []
    for name, (n_bytes, call) in cases.items():
        own, copied = device_ms(cupy, call, copy_of(cupy, n_bytes))
        rows.append(
            f"| {name}, {n:,} elements | {own:.3f} ms | a copy of the same bytes | {copied / own:.0%} of it | 80 % |"
        )
    return rows


def select_rows(cupy, torch, n: int) -> list[str]:
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
    return [
        f"| exact top 1 % of {n:,} | {own:.3f} ms | {name}, {other:.3f} ms | {other / own:.1f}x | 5x torch.topk |"
        for name, other in zip([*calls][1:], others, strict=True)
    ]


def convolution_rows(cupy) -> list[str]:
    """The convolutions of the reference CNN, by cuDNN and by lowering."""
    from distopt.nn.kernels import gpu as ops
    from distopt.nn.kernels import gpu_cudnn

    if device.find_cudnn()[0] is None:
        return []
    rng, rows = cupy.random.default_rng(2), []
    for channels, size, filters in ((1, 28, 20), (20, 12, 50)):
        x = rng.standard_normal((BATCH, channels, size, size), dtype=cupy.float32)
        w = rng.standard_normal((filters, channels, 5, 5), dtype=cupy.float32)
        b = rng.standard_normal(filters, dtype=cupy.float32)
        y, saved = ops.conv2d(x, w, b)
        gradients = cupy.ones_like(y), saved, cupy.empty_like(w), cupy.empty_like(b)

        def forward(road: str, given=(x, w, b)) -> None:
            with gpu_cudnn.convolving_by(road):
                ops.conv2d(*given)

        def backward(road: str, given=gradients) -> None:
            with gpu_cudnn.convolving_by(road):
                ops.conv2d_backward(*given)

        for name, call in (("convolution", forward), ("its gradients", backward)):
            own, other = device_ms(cupy, partial(call, "cudnn"), partial(call, "lowering"), repeats=20)
            rows.append(
                f"| {name}, [{BATCH}, {channels}, {size}, {size}] to {filters} channels by 5 x 5, cuDNN | {own:.3f} ms | "
                f"lowering, {other:.3f} ms | {other / own:.2f}x | |"
            )
    return rows


def ours(use_graph: bool = False):
    """One call that trains the reference CNN on a batch, as CUDA graphs or not."""
    cnn, x, y = compiled(opt.DistOpt(sgd()), BATCH, use_graph=use_graph)
    return lambda: cnn(x, y)


def torch_step(torch, compiled: bool):
    """The same by PyTorch."""
    from .peers.ranks.train_torch import network

    net = network().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-5)
    x, y = torch.randn(BATCH, 1, 28, 28, device="cuda"), torch.randint(0, 10, (BATCH,), device="cuda")
    forward = torch.compile(net) if compiled else net

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(forward(x), y).backward()
        optimizer.step()

    return step


def cnn_rows(cupy, torch) -> list[str]:
    step = ours()
    (own,) = device_ms(cupy, step, repeats=20)
    rows = [f"| CNN step, batch {BATCH}: {BATCH / own * 1e3:,.0f} images/s | {own:.3f} ms | | | |"]
    # Alone, as the wish for graphs is the device's; `step` has been measured by now.
    replay = ours(use_graph=True)
    (replayed,) = device_ms(cupy, replay, repeats=20)
    rows.append(
        f"| CNN step, batch {BATCH}, CUDA graphs: {BATCH / replayed * 1e3:,.0f} images/s | {replayed:.3f} ms | "
        f"without, {own:.3f} ms | {own / replayed:.2f}x | |"
    )
    device.create_cuda_gpu().EnableGraph(False)
    for is_compiled in (False, True) if torch is not None else ():
        # Streams of two libraries: one call at a time, and PyTorch on CuPy's stream.
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            own, other = device_ms(cupy, step, torch_step(torch, is_compiled), repeats=20)
        name = "PyTorch compiled" if is_compiled else "PyTorch eager"
        must = "" if is_compiled else "1x"
        rows.append(
            f"| CNN step, batch {BATCH} | {own:.3f} ms | {name}, {other:.3f} ms | {other / own:.2f}x | {must} |"
        )
    return rows


def reduce_rows(rank: int, world_size: int, file: str) -> None:
    """Collective. DistOpt's communicator against ncclAllReduce called by CuPy."""
    import cupy
    from cupy.cuda import nccl

    communicator = opt.DistOpt(opt.SGD()).communicator
    if communicator.name != "nccl":
        sys.exit(f"the {communicator.name} communicator was chosen; set DISTOPT_BACKEND=nccl to see what is missing")
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
    parser.add_argument("--elements", type=at_least(100), default=ELEMENTS, metavar="N", help="of the bandwidth rows")
    parser.add_argument("--selected-from", type=at_least(100), default=SELECTED_FROM, metavar="N", help="of top-K")
    parser.add_argument("--write", metavar="FILE", help="put the table between its marks in this file")


def run(args: argparse.Namespace) -> None:
    cupy, missing = device.find_cupy()
    if cupy is None:
        raise MissingDependencyError(f"the benchmark measures on a GPU: {missing}")
    device.create_cuda_gpu()
    torch = find_torch()
    lines = [versions(cupy, torch), "", table(["what", "time", "against", "result", "must hold"], [])]
    lines += bandwidth_rows(cupy, args.elements) + select_rows(cupy, torch, args.selected_from)
    lines += convolution_rows(cupy) + cnn_rows(cupy, torch)
    if args.np > 1:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows")
            launch.spawn(reduce_rows, args.np, (str(file),))
            lines += file.read_text().splitlines()
    print("\n".join(lines))
    if args.write:
        put(Path(args.write), "gpu", "\n".join(lines))
