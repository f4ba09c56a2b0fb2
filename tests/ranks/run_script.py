"""A rank under `distopt run` that uses its variables alone. The first argument says what it does."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAST = RANK == SIZE - 1
NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")


def main(how: str) -> None:
    if how == "variables":
        print(json.dumps([RANK, SIZE, *(os.environ[name] for name in NAMES)]))
        print(os.environ["DISTOPT_JOB_SECRET"], file=sys.stderr)
    elif how == "lines":  # of odd lengths, written in pieces
        for i in range(60):
            for stream in (sys.stdout, sys.stderr):
                stream.write(f"{RANK}:{i} ")
                stream.flush()
                stream.write(chr(97 + RANK) * (i * 37 % 211) + "\n")
    elif how == "fail twice":
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print(f"attempt {attempt}")
        if LAST and attempt < 2:
            os.kill(os.getpid(), signal.SIGSEGV)
    elif how.startswith("exit") and LAST:
        sys.exit(int(how.split()[1]))
    elif how == "child":  # that outlives SIGTERM, and its parent
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif LAST:
            os.kill(os.getpid(), signal.SIGKILL)
        stay()
    elif how == "deaf":
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        stay()
    elif how == "save":
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            signal.signal(signum, saved)
        stay()
    elif how == "port":
        place = ("", int(os.environ["MASTER_PORT"]))
        for reuse in (0, 1):
            server, said = socket.socket(), "listens"
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            try:
                server.bind(place)
                server.listen()
            except OSError as error:
                said = error.strerror
            print(f"with SO_REUSEADDR {reuse}: {said}")
    else:
        stay()


def saved(signum: int, _: object) -> None:
    print(f"got {signal.Signals(signum).name}")
    if signum == signal.SIGTERM:
        time.sleep(1.5)  # longer than after a failure
        Path(sys.argv[2], str(RANK)).touch()
        sys.exit(0)


def stay() -> None:
    print(f"{os.getpid()} stays", flush=True)
    time.sleep(1000)


if __name__ == "__main__":
    main(sys.argv[1])
