"""The calls of NVRTC that distopt makes through CuPy: the sources are compiled by the C++ compiler, for the emulator."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
from pathlib import Path

from tests.emulation.build import compiler

_HERE = Path(__file__).parents[2]
_KNOWN = re.compile(r"--std=c\+\+17|--fmad=false|--device-as-default-execution-space|-arch=sm_\d+")
_FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")

_ENTRY = """
extern "C" __attribute__((visibility("default"))) int {name}(const emulation::Launch* launch) {{
  return emulation::enter(&{expression}, *launch);
}}
"""


class NVRTCError(RuntimeError):
    """As CuPy's."""


class _Program:
    def __init__(self, source: str, name: str) -> None:
        self.source, self.name = source, name
        self.expressions: list[str] = []
        self.library: Path | None = None
        self.log = ""


_programs: dict[int, _Program] = {}


def getVersion() -> tuple[int, int]:  # noqa: N802
    return 13, 0


def createProgram(src: str, name: str, headers: object, include_names: object) -> int:  # noqa: N802
    program = _Program(src, name)
    _programs[id(program)] = program
    return id(program)


def destroyProgram(prog: int) -> None:  # noqa: N802
    del _programs[prog]


def addNameExpression(prog: int, name: str) -> None:  # noqa: N802
    _programs[prog].expressions.append(name)


def getLoweredName(prog: int, name: str) -> str:  # noqa: N802
    return f"entry_{_programs[prog].expressions.index(name)}"


def getProgramLog(prog: int) -> str:  # noqa: N802
    return _programs[prog].log + "\0"


def getCUBIN(prog: int) -> bytes:  # noqa: N802
    """The path of a library with the kernels."""
    return os.fsencode(str(_programs[prog].library))


def compileProgram(prog: int, options: tuple[str, ...]) -> None:  # noqa: N802
    """Compile the kernels, once for all processes."""
    program = _programs[prog]
    unknown = [option for option in options if not _KNOWN.fullmatch(option)]
    if unknown or '#include "' in program.source:
        program.log = f"the stand-in knows no {unknown or 'headers'}"
        raise NVRTCError("NVRTC_ERROR_INVALID_OPTION (5)")
    entries = (_ENTRY.format(name=f"entry_{i}", expression=name) for i, name in enumerate(program.expressions))
    text = "#include <emulation/entry.h>\n" + program.source + "".join(entries)
    folder = Path(os.environ["CUPY_CACHE_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    program.library = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.so"
    with program.library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if program.library.exists():
            return
        new = program.library.with_suffix(".new")
        command = [compiler(), *_FLAGS, f"-I{_HERE}", "-xc++", "-", "-o", str(new)]
        ended = subprocess.run(command, input=text, capture_output=True, text=True)
        if ended.returncode:
            program.log = ended.stderr
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")
        new.rename(program.library)
