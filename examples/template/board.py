"""TensorBoard, a line about progress, and the pace of training."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path


class Board:
    """Writes numbers for TensorBoard; nothing without a folder. It needs tensorboardX.

    TensorBoard drops the numbers that an earlier run wrote after `step`, from which this run continues.
    """

    def __init__(self, folder: str | Path | None, step: int) -> None:
        self.writer = None
        if folder is not None:
            # Not SummaryWriter, which has a queue: a job that is killed would lose the numbers in it.
            from tensorboardX.event_file_writer import EventsWriter

            Path(folder).mkdir(parents=True, exist_ok=True)
            self.writer = EventsWriter(f"{folder}/events")
            self._write(step + 1, session_log={"status": "START"})

    def add(self, step: int, numbers: dict[str, float]) -> None:
        self._write(step, summary={"value": [{"tag": name, "simple_value": x} for name, x in numbers.items()]})

    def _write(self, step: int, **content: dict) -> None:
        if self.writer is not None:
            from tensorboardX.proto.event_pb2 import Event

            self.writer.write_event(Event(wall_time=time.time(), step=step, **content))
            self.writer.flush()


@contextlib.contextmanager
def served(folder: Path, port: int | None) -> Iterator[None]:
    """TensorBoard's page on this port of this machine; none without a port."""
    if port is None:
        yield
        return
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"TensorBoard: http://localhost:{port} (later: tensorboard --logdir {folder})", flush=True)
    try:
        yield
    finally:
        server.terminate()
        server.wait()


def show(text: str) -> None:
    """Have a terminal show this until the next text."""
    if sys.stderr.isatty():
        print(f"\r{text:79.79}\r", end="", file=sys.stderr, flush=True)


class Pace:
    """Images per second of a DDP job, and what its steps send and wait for, over some steps.

    A rank waits from its last gradient to the end of the pass (not over NCCL). Bytes: those of the best all_reduce.
    """

    def __init__(self, ddp, batch_size: int) -> None:
        trained = [each for each in ddp.parameters() if each.requires_grad]
        for parameter in trained:
            parameter.register_hook(self._gradient)
        ranks = ddp.process_group.size()
        self.images, self.bytes = batch_size * ranks, sum(each.nbytes for each in trained) * 2 * (ranks - 1) / ranks
        self.start()

    def start(self) -> None:
        self.steps, self.waited, self.began = 0, 0.0, time.perf_counter()

    def _gradient(self, _) -> None:
        self.last = time.perf_counter()

    def end_backward(self) -> None:
        """To be called after each backward pass."""
        self.steps, self.waited = self.steps + 1, self.waited + time.perf_counter() - self.last

    def speed(self) -> float:
        return self.steps * self.images / (time.perf_counter() - self.began)

    def figures(self) -> dict[str, float]:
        """Of the steps since the last call."""
        steps, waited, speed = self.steps, self.waited, self.speed()
        self.start()
        return {
            "speed/images per s": speed,
            "speed/bytes per step": self.bytes,
            "speed/ms of waiting per step": waited / steps * 1000,
            "speed/share of waiting": waited * speed / (steps * self.images),
        }
