"""The code blocks of README and of docs, and how they run.

A block of Python with a title that ends in `.py` is a file. A block of commands runs in the folder of the page's files,
and a block of text after it is the beginning of what it prints, digits apart. The test of each page says how its other
blocks run.
"""

import os
import re
import socket
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.processes import ROOT, Ended, Program

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str  # its path in the repository
    line: int  # number of the first one
    language: str  # the first word behind the fence
    title: str  # or empty
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def blocks_of(page: str) -> tuple[Block, ...]:
    text = (ROOT / page).read_text()
    return tuple(
        Block(page, text.count("\n", 0, match.start()) + 2, match[1], match[2] or "", match[3])
        for match in re.finditer(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$', text, re.M | re.S)
    )


def with_outputs(page: str) -> list[tuple[Block, str]]:
    """The blocks of a page, each with the text of a block of output that follows it, or an empty one."""
    found = blocks_of(page)
    texts = [block.text if block.language == "text" else "" for block in found[1:]]
    return list(zip(found, [*texts, ""], strict=False))


def blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page) if block.language == language]


def commands_of(block: Block) -> list[str]:
    """The command lines of a block, without comments."""
    lines = [re.sub(r"(^|\s)#.*", "", line).rstrip() for line in block.text.splitlines()]
    return [line for line in lines if line]


def run(command: list[str], folder: Path) -> Ended:
    """Run in `folder`, where scripts of the page import each other, with this environment's programs first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"PATH": path, "PYTHONPATH": f"{ROOT}:{folder}", "DISTOPT_DEVICE": "cpu"}
    return Program(["env", "-C", str(folder), *command], env).end()


def missing_lines(expected: str, output: str) -> list[str]:
    """The lines of a page's output that a program has not printed, numbers apart; the page calls this host "a"."""
    output = normal(output.replace(socket.gethostname(), "a"))
    return [line for line in expected.splitlines() if line != "..." and normal(line) not in output]


def normal(text: str) -> str:
    return re.sub(r"\d[\d,.]*", "0", text)
