"""A script with spawned ranks that end as the first argument says."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from distopt import launch
from distopt.errors import PeerLostError


def work(rank: int, world_size: int, how: str) -> None:
    print(f"rank {rank} of {world_size} pid {os.getpid()} threads {os.environ['OMP_NUM_THREADS']}")
    if how == "loss before its cause":
        hide_the_cause(rank)
    if rank == 1:
        match_end(how)
    if how not in {"success", "slow exit"}:
        time.sleep(1000)


def hide_the_cause(rank: int) -> None:
    """The parent sleeps while rank 1 ends silently and rank 0 reports the loss: it learns of both at once."""
    if rank == 1:
        os.kill(os.getppid(), signal.SIGSTOP)
        os._exit(3)
    while Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.01)
    time.sleep(0.2)  # until rank 1 has ended
    subprocess.Popen(["/bin/sh", "-c", f"sleep 1; kill -CONT {os.getppid()}"])
    raise PeerLostError("rank 1 is gone")


def match_end(how: str) -> None:
    if how == "raise":
        raise ValueError("the cause")
    if how.startswith("sys.exit"):
        sys.exit("a cause in words" if how == "sys.exit text" else 3)
    if how == "os._exit":
        os._exit(3)
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])


if __name__ == "__main__":
    launch.main(work, int(sys.argv[2]), (sys.argv[1],))
