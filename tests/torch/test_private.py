"""The names of PyTorch that are not documented: each exists in the installed version, and one file has them all."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from distopt.torch import DistoptProcessGroup, SyncBatchNorm, private
from distopt.torch.group.messages import PendingMessage
from distopt.torch.group.queue import PendingWork

ROOM = Path(private.__file__).parent


@pytest.fixture(scope="module")
def objects() -> Iterator[dict[str, Any]]:
    """Where the paths of `USES` begin."""
    dist.init_process_group("distopt", store=dist.HashStore(), rank=0, world_size=1)
    yield {"torch": torch, "ddp": torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))}
    dist.destroy_process_group()


def missing(path: str, objects: dict[str, Any]) -> str:
    """The first part of a path that does not exist."""
    if path.startswith("torch._dynamo."):  # which takes ten seconds to import
        name = path.removeprefix("torch._dynamo.")
        files = (Path(torch.__file__).parent / "_dynamo").glob("*.py")
        return "" if any(name in file.read_text() for file in files) else path
    first, *names = path.split(".")
    found, so_far = objects[first], first
    for name in names:
        so_far += f".{name}"
        if not hasattr(found, name):
            try:
                found = importlib.import_module(so_far)
            except ImportError:
                return so_far
        else:
            found = getattr(found, name)
    return ""


@pytest.mark.parametrize("path", private.USES)
def test_pytorch_has_the_name(path: str, objects: dict[str, Any]) -> None:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    lost = missing(path, objects) if version < private.UNNEEDED_SINCE.get(path, (99,)) else ""
    assert not lost, f"torch {torch.__version__} has no {lost}, which distopt.torch uses {private.USES[path]}"


def test_a_name_that_is_gone_is_found(objects: dict[str, Any]) -> None:
    assert missing("torch._C._gone.more", objects) == "torch._C._gone"
    assert missing("ddp._gone", objects) == "ddp._gone"
    assert missing("torch._dynamo._gone", objects) == "torch._dynamo._gone"


def test_the_table_has_every_private_name_of_its_file() -> None:
    tree = ast.parse((ROOM / "private.py").read_text())
    in_table = {name for path in private.USES for name in path.split(".")}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    own = defined_in(ROOM / "private.py") | {"_getframe"}  # this one is Python's
    assert {name for name in used if is_private(name)} - own <= in_table


def test_no_other_file_has_a_private_name() -> None:
    """Of PyTorch's: one that the room and its bases do not define, or a module that begins with an underscore."""
    files = [path for path in ROOM.rglob("*.py") if path.name != "private.py"]
    own = {name for path in [*files, *(ROOM.parent / "data").rglob("*.py")] for name in defined_in(path)}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                assert node.attr in own, f"{path.name}:{node.lineno} uses {node.attr}"
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("torch"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                assert not any(map(is_private, names)), f"{path.name}:{node.lineno} imports {names}"


@pytest.mark.parametrize("kind", [DistoptProcessGroup, SyncBatchNorm, PendingMessage, PendingWork])
def test_no_other_file_overrides_a_private_method(kind: type) -> None:
    """PyTorch's classes call these on objects of ours."""
    of_torch = {name for base in kind.__mro__ if base.__module__.startswith("torch") for name in vars(base)}
    for base in kind.__mro__:
        if base.__module__.startswith("distopt.torch") and base.__module__ != private.__name__:
            both = {name for name in vars(base) if is_private(name)} & of_torch
            assert not both, f"{base.__module__} overrides {both}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_in(path: Path) -> set[str]:
    """Names of functions, classes and variables, and attributes that methods set."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names
