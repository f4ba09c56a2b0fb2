"""Without a compiler or Python's headers, or on a free-threaded Python, a build ends with a line that helps."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In place of another Python: what CMake asks of this one is answered differently.
FREE_THREADED = """
import sysconfig
abi = "cpython-314t-x86_64-linux-gnu"
sysconfig.get_config_vars().update(SOABI=abi, EXT_SUFFIX=f".{abi}.so")
"""
NO_HEADERS = """
import sysconfig
paths = sysconfig.get_paths
sysconfig.get_path = lambda name, *a, **k: "/nowhere" if "include" in name else paths(*a, **k)[name]
sysconfig.get_paths = lambda *a, **k: {n: "/nowhere" if "include" in n else p for n, p in paths(*a, **k).items()}
sysconfig.get_config_vars().update(INCLUDEPY="/nowhere", CONFINCLUDEPY="/nowhere")
"""


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found, f"pip install {name}"
    return found


@pytest.mark.parametrize(
    ("python", "compiler", "said"),
    [
        ("", False, "distopt needs a C++17 compiler, and there is none: apt install g++, or set CXX to one"),
        (NO_HEADERS, True, "distopt needs the headers of Python, and there are none: apt install python3-dev"),
        (FREE_THREADED, True, "this free-threaded Python lacks: use the other build of it"),
    ],
    ids=["no compiler", "no headers", "free-threaded"],
)
def test_a_build_that_cannot_work_says_what_to_do(python, compiler, said, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(python)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    env.pop("CXX", None)
    if not compiler:
        env["PATH"] = str(tmp_path)
    options = [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}"]
    command = [tool("cmake"), "-G", "Ninja", "-S", str(ROOT), "-B", str(tmp_path / "build"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ended.returncode != 0
    assert said in " ".join(ended.stderr.split())
