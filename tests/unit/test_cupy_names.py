"""The stand-in for CuPy has nothing that CuPy has not. Needs the real CuPy, which imports without a driver."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from instruments.emulation import build

LIST = """
import json
from instruments.emulation import activate
activate()
import cupy
public = lambda thing: [name for name in vars(thing) if not name.startswith("_")]
own = {"FUNCTIONS", "TYPES", "annotations", "Any", "SimpleNamespace"}
print(json.dumps({
    "cupy": [*cupy.FUNCTIONS, *cupy.TYPES, "add.at", "empty", "full", "zeros", "ones", "arange", "array", "asarray",
             "asnumpy", "ascontiguousarray", "ndarray", "RawModule", "RawModule.get_function"],
    "cupy.ndarray": public(cupy.ndarray),
    "cupy.random.Generator": public(cupy.random.Generator),
    "cupy.cuda": [*cupy.cuda.__all__, "BaseMemory", "Memory", "MemoryPointer"],
    "cupy.cuda.Stream": [n for n in dir(cupy.cuda.Stream) if not n.startswith("_")],
    "cupy.cuda.Event": public(cupy.cuda.Event),
    "cupy.cuda.runtime": [n for n in public(cupy.cuda.runtime) if n not in own],
    "cupy.cuda.nvrtc": public(cupy.cuda.nvrtc),
    "cupy.cuda.compiler": ["CompileException"],
}))
"""

COMPARE = """
import json, sys
import cupy
missing = []
for owner, names in json.load(sys.stdin).items():
    for name in names:
        thing = cupy
        for part in [*owner.split(".")[1:], *name.split(".")]:
            thing = getattr(thing, part, missing)
        if thing is missing:
            missing.append(f"{owner}.{name}")
print("missing:", *missing)
"""


@pytest.mark.skipif(find_spec("cupy") is None, reason="needs the real CuPy; pip install cupy-cuda13x")
def test_the_real_cupy_has_all_that_the_stand_in_has():
    build.build()
    names = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True, check=True).stdout
    assert len(json.loads(names)["cupy"]) > 50
    ended = subprocess.run([sys.executable, "-c", COMPARE], input=names, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["missing:"]
