"""Record a job of two hosts that loses one, as an animated picture: docs/healing.svg.

    sudo .venv/bin/python docs/tools/record.py docs/healing.svg      what `make recording` runs

`examples/pytorch/language/train.py` trains under `distopt run --heal --nnodes 1:2`, one rank on each of two network
namespaces. All processes of the second host are killed; the same command is started there again. Every line of the
picture is one that the job printed, but for those that begin with # and $, and comes at its time; pauses are shortened
to two seconds. Needs root, iproute2, and what the example needs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from html import escape
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.networks.emulation import LINK, Host, near_hosts

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/pytorch/language"
SCRIPT = ["train.py", "--test-every", "10"]
LIMIT_SECONDS = 120.0
# The picture, in characters and pixels; the rows of each host's terminal.
COLUMNS, ROWS = 100, (14, 4)
WIDTH, LINE, FONT, MARGIN, HEAD = 860, 18, 14, 10, 24
LAST_SECONDS = 4.0  # for which the end stands still
LONGEST_PAUSE = 2.0  # of what is shown


class Terminal:
    """The lines that one host shows, with the seconds at which they came, and how each is drawn."""

    def __init__(self, host: Host, began: float) -> None:
        self.lines: list[tuple[float, str, str]] = []
        self._host, self._began = host, began
        self._printed: list[str] = []
        self._job: subprocess.Popen[str] | None = None

    def show(self, text: str, kind: str = "") -> None:
        """Add a line, wrapped, as `kind` is drawn."""
        text = text.expandtabs(4)
        for part in textwrap.wrap(text, COLUMNS, subsequent_indent="    ") or [""]:
            self.lines.append((time.monotonic() - self._began, part, kind))

    def start(self, options: list[str]) -> None:
        """Type the command, and show what it prints."""
        self.show("$ " + " ".join(["distopt run", *options, *SCRIPT]), "typed")
        command = [sys.executable, "-W", "ignore", "-m", "distopt", "run", *options, *SCRIPT]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK}
        env["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # c10d warns of addresses without a name, which emulated hosts have
        # A session of its own, which a lost machine takes with it.
        self._job = subprocess.Popen(
            self._host.inside(command),
            cwd=FOLDER,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self._job,), daemon=True).start()

    def _read(self, job: subprocess.Popen[str]) -> None:
        assert job.stdout is not None
        for line in job.stdout:
            self._printed.append(line)
            if line.strip():
                kind = "healed" if line.startswith("distopt run:") else ""
                self.show(line.rstrip(), kind)

    def lose(self) -> None:
        """SIGKILL to the agent and to all that it has started."""
        if self._job is None:
            return
        for pid in [self._job.pid, *_below(self._job.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._job.wait()

    def wait_for(self, pattern: str, count: int = 1) -> None:
        """Until so many lines match."""
        end = time.monotonic() + LIMIT_SECONDS
        while self.count(pattern) < count:
            if time.monotonic() > end:
                sys.exit(f"no line {pattern!r} in:\n{''.join(self._printed)}")
            time.sleep(0.02)

    def count(self, pattern: str) -> int:
        """Lines that match."""
        return sum(bool(re.search(pattern, line)) for line in list(self._printed))


def _below(pid: int) -> list[int]:
    """The descendants of a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    own = list(map(int, children.read_text().split())) if children.exists() else []
    return own + [each for child in own for each in _below(child)]


def recorded() -> tuple[Terminal, Terminal]:
    """Run the job."""
    with near_hosts(2) as hosts:
        began = time.monotonic()
        first, second = (Terminal(host, began) for host in hosts)
        options = ["--heal", "--nnodes", "1:2", "--rdzv-endpoint", f"{hosts[0].address}:29400"]

        def trains_on(lines: int) -> None:
            first.wait_for("^step", first.count("^step") + lines)

        try:
            first.start(options)
            second.start(options)
            trains_on(3)
            second.show("# the power goes out here: SIGKILL to all processes of this host", "note")
            second.lose()
            first.wait_for("; healed")
            trains_on(3)
            second.show("# the machine is back: the same command", "note")
            second.start(options)
            first.wait_for("; healed", 2)
            trains_on(3)
            ends = [list(terminal.lines) for terminal in (first, second)]  # without what they print when they end
        finally:
            for terminal in (first, second):
                terminal.lose()
    first.lines, second.lines = ends
    return first, second


def picture(terminals: tuple[Terminal, Terminal]) -> str:
    """The SVG: each line becomes visible at its time, and terminals scroll; without motion it shows the end."""
    times = sorted(at for terminal in terminals for at, _, _ in terminal.lines)
    shown = {times[0]: 0.5}  # the second of the picture
    for before, at in pairwise(times):
        shown[at] = shown[before] + min(at - before, LONGEST_PAUSE)
    seconds = shown[times[-1]] + LAST_SECONDS
    rules, drawn, top = [], [], 0
    for number, (terminal, rows, title) in enumerate(zip(terminals, ROWS, ("machine a", "machine b"), strict=True)):
        share: Callable[[float], str] = lambda at: f"{100 * shown[at] / seconds:.2f}%"  # noqa: E731
        height, shift, frames, texts = rows * LINE + MARGIN, 0, ["0%{transform:none}"], []
        for index, (at, text, kind) in enumerate(terminal.lines):
            name = f"l{number}-{index}"
            rules.append(f"@keyframes {name}{{0%{{opacity:0}}{share(at)}{{opacity:1}}}}")
            if index >= rows:
                shift = (index + 1 - rows) * LINE
                frames.append(f"{share(at)}{{transform:translateY(-{shift}px)}}")
            style = f' class="{kind}"' if kind else ""
            y = HEAD + LINE * (index + 1) - 4
            texts.append(f'<text{style} x="{MARGIN}" y="{y}" style="animation-name:{name}">{escape(text)}</text>')
        rules.append(f"@keyframes s{number}{{{''.join(frames)}100%{{transform:translateY(-{shift}px)}}}}")
        drawn.append(
            f'<svg y="{top}" width="{WIDTH}" height="{HEAD + height}">'
            f'<text class="title" x="{MARGIN}" y="17">{title}</text>'
            f'<svg y="{HEAD}" width="{WIDTH}" height="{height}" viewBox="0 {HEAD} {WIDTH} {height}">'
            f'<g style="transform:translateY(-{shift}px);animation-name:s{number}">{"".join(texts)}</g></svg></svg>'
        )
        top += HEAD + height
        if number == 0:
            drawn.append(f'<path d="M0 {top}H{WIDTH}" stroke="#4b5563"/>')
    style = (
        f"text{{font:{FONT}px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d7dce2;"
        "white-space:pre}"
        ".title{fill:#8b949e}.typed{fill:#ffffff;font-weight:bold}.note{fill:#ff9d76}.healed{fill:#7ee787}"
        f"g,g text{{animation-duration:{seconds:.1f}s;animation-timing-function:step-end;"
        "animation-iteration-count:infinite}"
        "@media (prefers-reduced-motion:reduce){g,g text{animation:none!important}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}">'
        "<title>Two terminals: one of two machines is lost, the other trains on, and takes it back</title>"
        f"<style>{style}{''.join(rules)}</style>"
        f'<rect width="{WIDTH}" height="{top}" rx="8" fill="#161b22" stroke="#4b5563"/>{"".join(drawn)}</svg>\n'
    )


def main() -> None:
    """Run the job, and write its picture."""
    path = Path(sys.argv[1])
    path.write_text(picture(recorded()))
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
