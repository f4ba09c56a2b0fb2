"""The real cudnn-frontend takes the graphs that distopt builds, and has all that the stand-in has. Needs no GPU."""

import subprocess
import sys

import pytest

from distopt.nn.devices.discovery import find_cudnn
from tests.emulation import build

pytestmark = pytest.mark.skipif(find_cudnn()[0] is None, reason=find_cudnn()[1])

# The real package is imported before the stand-in can stand before it.
BEGIN = """
import importlib.util, inspect, sys, types
import cudnn
from tests.emulation import activate
activate()
from pathlib import Path
from tests import emulation
from distopt.nn.kernels import gpu_cudnn
"""

# Up to its validation, a graph needs no driver if it gets the architecture of a device and a dummy handle.
GRAPHS = (
    BEGIN
    + """
class Validated(Exception): pass
class Graph(cudnn.pygraph):
    def build_operation_graph(self): raise Validated
names = {name: getattr(cudnn, name) for name in ("data_type", "heur_mode", "numerical_note")}
real = types.SimpleNamespace(pygraph=Graph, **names)
place = {"handle": cudnn.Handle(0, 0, 0)} if hasattr(cudnn, "Handle") else {}  # once they were integers
shapes = {"x": (2, 3, 11, 9), "w": (5, 3, 3, 2), "y": (2, 5, 6, 10)}
for kind in gpu_cudnn.OPERATIONS:
    try:
        gpu_cudnn.build_graph(real, kind, shapes, (2, 1, 1, 1), sm_version=900, **place)
    except Validated:
        print(kind)
gpu_cudnn._refused_notes(real)
"""
)

NAMES = (
    BEGIN
    + """
path = Path(emulation.__file__).parent / "cudnn" / "__init__.py"
spec = importlib.util.spec_from_file_location("stand_in", path, submodule_search_locations=[str(path.parent)])
stand_in = sys.modules["stand_in"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)
assert stand_in.__file__ != cudnn.__file__
count = 0

def compare(name, own, other):
    global count
    count += 1
    if other is None:
        return print("missing:", name)
    try:
        parameters = inspect.signature(other).parameters
    except ValueError:  # a compiled function does not say
        return
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values()):
        for parameter in inspect.signature(own).parameters.values():
            if parameter.kind != parameter.POSITIONAL_ONLY and parameter.name not in parameters:
                print("missing:", f"{name}({parameter.name}=)")

for name in ("create_handle", "set_stream", "backend_version", "backend_version_string"):
    compare(name, getattr(stand_in, name), getattr(cudnn, name, None))
for name, own in vars(stand_in.pygraph).items():
    if callable(own) and not name.startswith("_"):
        compare(name, own, getattr(cudnn.pygraph, name, None))
for name in ("data_type", "heur_mode", "numerical_note"):
    for entry in getattr(stand_in, name):
        count += 1
        if not hasattr(getattr(cudnn, name), entry.name):
            print("missing:", name, entry.name)
print("compared", count)
"""
)


def output(code: str) -> list[str]:
    build.build()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_graphs_are_valid():
    assert output(GRAPHS) == ["fprop", "dgrad", "wgrad"]


def test_the_real_package_has_all_that_the_stand_in_has():
    *missing, last = output(NAMES)
    assert missing == []
    assert int(last.removeprefix("compared ")) > 25
