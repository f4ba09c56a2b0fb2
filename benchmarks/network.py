"""Two hosts at 1 Gbit/s and at 100 Mbit/s: steps per second and bytes per step for every codec, and for PyTorch DDP.

The hosts are network namespaces of this machine, joined by a veth pair whose ends are shaped by tc's token bucket.
Needs root, iproute2, MPICH with mpi4py, and PyTorch. Everything is removed again, even after a failure.

    sudo python benchmarks/network.py --steps 60
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from distopt.cli.bench.emulation import LINK, TwoHosts, two_hosts
from distopt.cli.bench.table import machine
from pages import ROOT, add_root_to_path, put

RATES = {"1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
WARM_UP_STEPS = 5
PARTIAL = "partial update"
# Arguments of distopt.compress.create.
SENT = {
    "fp32": {"name": "fp32"},
    "fp16": {"name": "fp16"},
    PARTIAL: {"name": "fp32"},
    "top-K 5 %": {"name": "top-k", "ratio": 0.05, "error_feedback": True},
    "top-K 1 %": {"name": "top-k", "ratio": 0.01, "error_feedback": True},
    "top-K 0.1 %": {"name": "top-k", "ratio": 0.001, "error_feedback": True},
    "threshold 0.01": {"name": "threshold", "bound": 0.01, "error_feedback": True},
    "PowerSGD rank 2": {"name": "power-sgd", "rank": 2, "error_feedback": True},
}
DDP = ("PyTorch DDP fp32", "PyTorch DDP fp16 hook", "PyTorch DDP PowerSGD hook, rank 2")


def link_rate(net: TwoHosts, megabytes: int = 10) -> float:
    """Mbit/s of one TCP connection, measured."""
    first, second = net.hosts
    receive = (
        "import socket, time; server = socket.create_server(('', 5001)); print(flush=True); peer, _ = server.accept()\n"
        "start, n = time.perf_counter(), 0\n"
        "while data := peer.recv(1 << 16): n += len(data)\n"
        "print(n * 8e-6 / (time.perf_counter() - start))"
    )
    send = f"import socket; socket.create_connection(('{second.address}', 5001)).sendall(bytes({megabytes * 10**6}))"
    receiver = subprocess.Popen(second.inside([sys.executable, "-c", receive]), stdout=subprocess.PIPE, text=True)
    try:
        receiver.stdout.readline()
        subprocess.run(first.inside([sys.executable, "-c", send]), check=True, timeout=60)
        return float(receiver.communicate(timeout=60)[0])
    finally:
        receiver.kill()


# -- the ranks ---------------------------------------------------------------------------------------------------------
def batch(rank: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rank)
    return rng.standard_normal((64, 1, 28, 28), np.float32), rng.integers(0, 10, 64).astype(np.int32)


def sent_bytes() -> int:
    """Bytes sent, from the interface's counter: headers and acknowledgements included."""
    return int(Path(f"/sys/class/net/{LINK}/statistics/tx_bytes").read_text())


def warm_up(step, barrier) -> None:
    for _ in range(WARM_UP_STEPS):
        step()
    barrier()


def measure(step, count: int) -> dict[str, float]:
    before, start = sent_bytes(), time.perf_counter()
    for _ in range(count):
        step()
    seconds = time.perf_counter() - start
    return {"steps_per_second": count / seconds, "interface_bytes": (sent_bytes() - before) / count}


def distopt_rank(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    from train_cnn import CNN

    from distopt import comm, compress, device, launch, opt, tensor

    class Net(CNN):
        def train_one_batch(self, x, y, name):
            loss = self.softmax_cross_entropy(self.forward(x), y)
            if name == PARTIAL:
                self.optimizer.step_by("partialUpdate", loss)
            else:
                self.optimizer(loss)

    communicator = comm.create(launch.join(), "mpi")
    records = {}
    for name, options in SENT.items():
        sgd = opt.SGD(lr=0.005, momentum=0.9, weight_decay=1e-5)
        codec = compress.create(**options)
        sgd = opt.DistOpt(sgd, communicator=communicator, codec=codec, partition_elements=100_000)
        device.get_default_device().SetRandSeed(0)
        x, y = map(tensor.from_numpy, batch(sgd.global_rank))
        net = Net()
        net.set_optimizer(sgd)
        net.compile([x], is_train=True)
        net.train()
        step = partial(net, x, y, name)
        warm_up(step, communicator.barrier)
        before = sgd.stats()
        records[name] = measure(step, args.steps)
        records[name]["bytes"] = (sgd.stats() - before).total.wire_bytes / args.steps
    if communicator.topology.rank == 0:
        assert len(set(communicator.topology.hosts)) == 2
        args.result.write_text(json.dumps(records))
    communicator.barrier()


def torch_rank(args: argparse.Namespace) -> None:
    import torch
    from torch import distributed, nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo")
    images, labels = batch(rank)
    x, y = torch.from_numpy(images), torch.from_numpy(labels).long()
    records = {}
    for name in DDP:
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)]
        # With several buckets Gloo aborts in the hook of PowerSGD (torch 2.13), probably because its second all-reduces
        # start in another order on each rank. A cap given by hand makes one bucket of all.
        cap = 25 if "PowerSGD" in name else None
        net = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=cap)
        if "fp16" in name:
            net.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if "PowerSGD" in name:
            # The hook must not begin before DDP has rebuilt its buckets, which is in the second step.
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
            )
            net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        sgd = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-5)
        criterion = nn.CrossEntropyLoss()

        def step(net=net, sgd=sgd, criterion=criterion) -> None:
            sgd.zero_grad()
            criterion(net(x), y).backward()
            sgd.step()

        warm_up(step, distributed.barrier)
        records[name] = measure(step, args.steps)
    if rank == 0:
        args.result.write_text(json.dumps(records))
    distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of Gloo may still run, and end a process that takes itself down by std::terminate


# -- the runs ----------------------------------------------------------------------------------------------------------
def start_distopt(net: TwoHosts, command: list[str]) -> None:
    subprocess.run(net.mpiexec(1, [*command, "--as-rank", "distopt"]), check=True, timeout=300)


def start_torch(net: TwoHosts, command: list[str]) -> None:
    env = {**os.environ, "MASTER_ADDR": net.hosts[0].address, "MASTER_PORT": "29533", "GLOO_SOCKET_IFNAME": LINK}
    env["WORLD_SIZE"] = "2"
    ranks = [
        subprocess.Popen(host.inside([*command, "--as-rank", "torch"]), env={**env, "RANK": str(rank)})
        for rank, host in enumerate(net.hosts)
    ]
    try:
        codes = [rank.wait(300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise SystemExit(f"PyTorch's ranks ended with {codes}")


def measure_all(args: argparse.Namespace) -> tuple[dict[str, dict], dict[str, float]]:
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    add_root_to_path()
    records, rates = {}, {}
    with tempfile.TemporaryDirectory() as name, two_hosts() as net:
        result = Path(name) / "result.json"
        command = [sys.executable, __file__, "--steps", str(args.steps), "--result", str(result)]
        for label, rate in RATES.items():
            for host in net.hosts:
                host.shape(rate)
            rates[label] = link_rate(net)
            records[label] = {}
            start_distopt(net, command)
            records[label] |= json.loads(result.read_text())
            start_torch(net, command)
            records[label] |= json.loads(result.read_text())
            for row, record in records[label].items():
                print(f"{label}: {row}: {record['steps_per_second']:.1f} steps/s", flush=True)
    return records, rates


def table(records: dict[str, dict]) -> str:
    fp32, ddp = (records[name]["steps_per_second"] for name in ("fp32", "PyTorch DDP fp32"))
    lines = [
        "| sent | steps/s | of fp32 | of DDP fp32 | sent per step and rank | through the interface |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, record in records.items():
        speed = record["steps_per_second"]
        own = f"{record['bytes'] / 1e3:.1f} kB" if "bytes" in record else ""
        lines.append(
            f"| {name} | {speed:.1f} | {speed / fp32:.2f} | {speed / ddp:.2f} | {own} | "
            f"{record['interface_bytes'] / 1e3:.1f} kB |"
        )
    return "\n".join(lines)


def write(records: dict[str, dict], rates: dict[str, float], args: argparse.Namespace) -> None:
    sections = "\n\n".join(
        f"### {label}\n\nOne TCP connection carries {rates[label]:.0f} Mbit/s.\n\n{table(record)}"
        for label, record in records.items()
    )
    facts = machine()
    text = f"""The reference CNN (431,080 parameters), batch size 64 per rank, with one single-threaded rank on each of two hosts. The
hosts are network namespaces of one machine, joined by a veth pair that `tc` limits to the stated rate. distopt
communicates through MPICH and PyTorch through Gloo, both over TCP. The machine has {facts["cores"]} cores of
{facts["processor"]}. {args.steps} timed steps of each row follow
{WARM_UP_STEPS} warm-up steps.
To repeat the run and rewrite this section:

```sh
sudo python benchmarks/network.py --steps {args.steps}
```

"Sent per step and rank" is what distopt counts; "through the interface" also includes TCP, IP and Ethernet
headers and acknowledgements. The sparse codecs and PowerSGD use error feedback. The partial update averages one of two
partitions per step; the partitions differ in size.

{sections}
"""
    put(args.output, "network.py", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each row")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "network.md", help="page with the marks")
    parser.add_argument("--as-rank", choices=("distopt", "torch"), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        {"distopt": distopt_rank, "torch": torch_rank}[args.as_rank](args)
        return
    if os.geteuid() != 0:
        parser.error("only root can create network namespaces; run it with sudo")
    write(*measure_all(args), args)


if __name__ == "__main__":
    main()
