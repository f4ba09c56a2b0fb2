import faulthandler
import fcntl
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings
from threadpoolctl import threadpool_limits

from distopt import _core, autograd
from tests.parts import pytest_addoption, pytest_collection_modifyitems  # noqa: F401 - hooks
from tests.processes import free_port, heed_signals, kill_programs, or_skipped

# On a machine with GPUs, too: the tests of a GPU, which are in tests/gpu, ask for one.
os.environ.setdefault("DISTOPT_DEVICE", "cpu")
heed_signals()
# A machine may be loaded.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def end_later(item: pytest.Item) -> None:
    """Some seconds after the test's limit, which a signal keeps, end this process, unless the test has ended.

    No signal ends a process that blocks with Python's lock held, as PyTorch's destructors of Gloo may, nor what blocks
    when the limit has passed: a fixture's end, for example.
    """
    mark = item.get_closest_marker("timeout")
    limit = float(mark.args[0] if mark else item.config.getini("timeout"))
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(limit + 30.0, file=stderr, exit=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    end_later(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    if isinstance(node, pytest.Item):  # for which pytest's own plugin has just cancelled it
        end_later(node)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Workers share the cores: where each had a thread for every core, these would spin while they wait for others."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    with threadpool_limits(1):
        yield


@pytest.fixture(autouse=True)
def evaluation_mode() -> Iterator[None]:
    """Training mode is a switch of the whole process, as in SINGA; no test may leave it on for the next."""
    yield
    autograd.training = False


@pytest.fixture(autouse=True)
def no_program_left() -> Iterator[None]:
    yield
    kill_programs()


@pytest.fixture
def training() -> None:
    """Operations are recorded for a backward pass."""
    autograd.training = True


@pytest.fixture
def peers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch from this environment instead of one of its own."""
    pytest.importorskip("torch")
    from benchmarks.peers.environments import Environment

    monkeypatch.setattr(Environment, "prepare", lambda *_: None)
    monkeypatch.setattr(Environment, "program", lambda *_: sys.executable)


@pytest.fixture(scope="session")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`once(name, function, *args)`: the function's result, made by the first of pytest's workers that asks."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if hasattr(request.config, "workerinput") else base  # workers have folders of their own there
    results: dict[str, Any] = {}

    def result(name: str, function: Callable[..., Any], *args: Any) -> Any:
        if name not in results:
            path = folder / f"{name}.pickle"
            with (folder / f"{name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    try:
                        outcome = function(*args), ""
                    except (Exception, pytest.fail.Exception):  # another try for each test that asks would take hours
                        outcome = None, traceback.format_exc()
                    path.write_bytes(pickle.dumps(outcome))
            results[name] = pickle.loads(path.read_bytes())
        value, error = results[name]
        if error:
            pytest.fail(error)
        return value

    return result


@pytest.fixture(params=_core.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of this machine, one after the other."""
    before = _core.isa()
    _core.set_isa(request.param)
    yield request.param
    _core.set_isa(before)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def net() -> Iterator[Any]:
    """Two hosts, which are network namespaces of this machine, with the MPI of mpi4py between them. Needs root."""
    pytest.importorskip("mpi4py", reason="mpi4py is absent: pip install mpi4py mpich", exc_type=ImportError)
    from benchmarks.networks.emulation import two_hosts

    with or_skipped(two_hosts()) as made:
        yield made
