"""TensorBoard, a progress bar, and the time for which a rank waits for the others."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm


class Board:
    """Writes numbers for TensorBoard; nothing without a folder. pip install "distopt[tensorboard]"

    What an earlier run has written after `step`, from which this one goes on, is shown no more.
    """

    def __init__(self, folder: str | Path | None, step: int) -> None:
        self.writer = None
        if folder is not None:
            from tensorboardX import SummaryWriter

            self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def add(self, step: int, numbers: dict[str, float]) -> None:
        if self.writer is not None:
            for name, number in numbers.items():
                self.writer.add_scalar(name, number, step)
            self.writer.flush()  # else a job that is killed loses what was written before its last checkpoint


@contextlib.contextmanager
def served(folder: Path, port: int | None) -> Iterator[None]:
    """TensorBoard's page on this port of this machine; none without a port."""
    if port is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"TensorBoard: http://localhost:{port} (later: tensorboard --logdir {folder})", flush=True)
    try:
        yield
    finally:
        server.terminate()
        server.wait()


def progress_bar(samples: int, done: int, *, shown: bool) -> tqdm:
    """Of an epoch, on terminals only."""
    tqdm.set_lock(threading.RLock())  # instead of a named semaphore, which would outlive a killed process
    disable = not (shown and sys.stderr.isatty())
    return tqdm(total=samples, initial=done, unit=" images", unit_scale=True, leave=False, disable=disable)


class Waiting:
    """Seconds from a rank's last gradient to the end of DDP's backward pass, when all sums are there; not so NCCL's.

    `bytes_per_step` is what a rank sends in an all_reduce of the gradients that is optimal in bandwidth.
    """

    def __init__(self, ddp) -> None:
        trained = [each for each in ddp.parameters() if each.requires_grad]
        for parameter in trained:
            parameter.register_hook(self._mark)
        ranks = ddp.process_group.size()
        self.bytes_per_step = sum(each.nbytes for each in trained) * 2 * (ranks - 1) / ranks
        self.seconds = self.last = 0.0

    def _mark(self, _) -> None:
        self.last = time.perf_counter()

    def taken(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def end(self) -> None:
        """To be called after each backward pass."""
        self.seconds += time.perf_counter() - self.last
