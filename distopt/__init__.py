"""Data-parallel training in Python.

`world = distopt.init()` makes this process a rank of its job, under any launcher; see `distopt.comm.world.World`.
Importing the package alone loads nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .comm.world import World
    from .launch import Ticket

__all__ = ["__version__", "init"]

__version__: str

_ABSENT = {
    "sonnx": "for ONNX, use PyTorch, which runs over distopt",
    "image_tool": "use Pillow or torchvision",
    "snapshot": "use Model.save_states or distopt.checkpoint",
    "utils": "the layers take SINGA's pad_mode themselves",
}


def init(ticket: Ticket | None = None, local_rank: int | None = None, world_size: int | None = None) -> World:
    """Collective. Join the job that this process belongs to; as `hvd.init` of Horovod.

    Without arguments, this is the job of `distopt.launch.main` or `spawn`, of mpiexec, or of this process alone.
    Processes that a script starts itself pass the three arguments. A second call returns the same world until it is
    closed, and a new one afterwards.

    Args:
        ticket: made by the parent, `distopt.launch.Ticket()`.
        local_rank: rank of this process in the ticket's job.
        world_size: number of processes in the ticket's job.

    Raises:
        LaunchError: the ranks do not find each other, or disagree about who they are.
        UsageError: `ticket` is not a Ticket, or this process has an open world, of other arguments.
        MissingDependencyError: the launcher or `$DISTOPT_TRANSPORT` needs something that is absent.
    """
    from .comm import world

    return world.init(ticket, local_rank, world_size)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> str:
        if name in _ABSENT:
            raise ImportError(
                f"distopt has no module {name} of SINGA's; {_ABSENT[name]} "
                "(see 'Coming from Apache SINGA' in the documentation)"
            )
        if name != "__version__":
            raise AttributeError(f"module 'distopt' has no attribute {name!r}; a module of it must be imported first")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("distopt-train")
        except PackageNotFoundError:  # used from a source tree
            return "not installed"
