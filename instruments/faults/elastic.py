"""Jobs in shards whose ranks are killed at random, and whose nodes are lost and return: one hash for each front.

    python -m instruments.faults.elastic                    # needs root, for hosts that are network namespaces
    python -m instruments.faults.elastic --hosts 1 --fronts nn --steps 500

prints a line for each: what ran, how often it was disturbed, and its hash. The exit code is 1 if two of a front differ.
"""

import argparse
import contextlib
import random
import sys

from benchmarks.networks.emulation import TwoHosts, two_hosts

from .healing import PORT, RUN, Job, disturb

FRONTS = {
    "nn": ["-m", "instruments.faults.healed"],
    "torch": ["-m", "instruments.torch.elastic", "dist-opt"],
    "ddp": ["-m", "instruments.torch.elastic", "ddp"],
}
Counted = tuple[int, list[str]]  # disturbances, and the hashes of all ranks


def killed_at_random(script: list[str], every: float, numbers: random.Random) -> Counted:
    """Two ranks, and SIGKILL to one of them every so many seconds."""
    count = 0
    with contextlib.ExitStack() as stack:
        job = Job([*RUN, "--heal", *script])
        stack.callback(job.kill)
        job.fork_server()
        while not job.finished(every):
            disturb(job, (), "SIGKILL", numbers)
            count += 1
        return count, job.end()


def lost_and_returned(script: list[str], every: float, net: TwoHosts) -> Counted:
    """Two hosts with two ranks each; one of them is lost, and returns, every so many seconds."""
    count = 0
    with contextlib.ExitStack() as stack:
        meet = ["--heal", "--nnodes", "1:2", "--rdzv-endpoint", f"{net.hosts[0].address}:{PORT}"]
        job = Job(*(host.inside([*RUN, *meet, *script]) for host in net.hosts))
        stack.callback(job.kill)
        job.wait_for(r"step \d+$")
        while not job.finished(every):
            job.kill_agent(1)
            job.wait_for("cannot be reached.*; healed: ", count + 1)
            job.more_steps()
            job.start_agent(1)
            job.wait_for("has come; healed: ", count + 1)
            count += 1
        return count, job.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fronts", type=lambda text: text.split(","), default=list(FRONTS))
    parser.add_argument("--hosts", type=int, choices=[1, 2], default=2)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--pause", default="0.02", help="seconds after each step (0.02)")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two faults (5)")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    numbers, differ = random.Random(args.seed), 0
    for front in args.fronts:
        script = [*FRONTS[front], "--steps", str(args.steps), "--pause", args.pause]
        undisturbed = Job([*RUN[:-1], "1", *script[:-1], "0"])
        want = undisturbed.end()
        print(f"{front:6} 1 rank, undisturbed {want[0]}", flush=True)
        trials = {
            "2 ranks, one killed at random": lambda script=script: killed_at_random(script, args.every, numbers),
        }
        with contextlib.ExitStack() as stack:
            if args.hosts == 2:
                net = stack.enter_context(two_hosts("h"))
                trials["2 x 2, a host lost and returned"] = lambda script=script, net=net: lost_and_returned(
                    script, args.every, net
                )
            for name, trial in trials.items():
                count, found = trial()
                same = set(found) == set(want)
                print(f"{front:6} {name}, {count} times {', '.join(sorted(set(found)))}{'' if same else '  differs'}")
                sys.stdout.flush()
                differ += not same or not count
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
