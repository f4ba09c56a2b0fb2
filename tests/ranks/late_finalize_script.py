"""A rank by torchrun's variables: `large_sums_script`. The server hears late that rank 1 has finalized MPI.

Its words pass through another process, which delays that one until after the end of rank 0, if rank 0 does not wait.
"""

import atexit
import contextlib
import os
import select
import socket
import time

from distopt import launch
from distopt.launch.rendezvous import mpi
from tests.ranks import large_sums_script

SECONDS = 1.0


class LateMember(mpi.Member):
    """Whose connection for MPICH is one to the relay."""

    def environment(self) -> contextlib.AbstractContextManager[None]:
        link, (self._mpi, end) = self._mpi, socket.socketpair()
        link.settimeout(None)
        if os.fork() == 0:
            self._mpi.close()
            relay(end, link)
            os._exit(0)
        link.close()
        end.close()
        return super().environment()


def relay(rank: socket.socket, server: socket.socket) -> None:
    to = {rank: server, server: rank}
    while True:
        for link in select.select([rank, server], [], [])[0]:
            if not (words := link.recv(1 << 16)):
                return
            if b"cmd=finalize" in words:
                time.sleep(SECONDS)
            to[link].sendall(words)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        mpi.Member = LateMember
    else:
        atexit.register(time.sleep, SECONDS / 2)  # after MPI_Finalize, while rank 1 says it
    launch.main(large_sums_script.main)
