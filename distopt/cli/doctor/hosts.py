"""Probes of the ways between hosts: UCX, and the transport that a job of several hosts would take."""

from __future__ import annotations

import os
from contextlib import suppress

from ...errors import DistoptError, pip_install
from ...settings import Settings
from .ask import ask
from .report import Finding, absent, failed, ok

_INSTALL = pip_install("hosts")


def ucx() -> Finding:
    """The library by which ranks of several hosts communicate without mpiexec."""
    try:
        answer = ask("ucx")
    except DistoptError as error:
        if "MissingDependencyError" in str(error):
            return absent("not installed", f"{_INSTALL} for jobs on several hosts")
        return failed(str(error), f"{_INSTALL}, or correct DISTOPT_UCX_LIBRARY")
    return ok(f"{answer['version']}, {answer['path']}")


def transport() -> Finding:
    """The transport that a job of several hosts would take on CPUs, and why."""
    from ...launch.launchers import launcher, launcher_of  # not before the probe runs: it may be incomplete
    from ...launch.rendezvous.meeting import meeting

    info = launcher()
    met = meeting(info) if info is not None else None
    wish = Settings.from_env().transport
    asked = "" if wish == "auto" else f" (DISTOPT_TRANSPORT={wish})"
    by_mpi = info is not None and launcher_of(info).connects(_mpi_library, os.environ)
    if info is not None and by_mpi and wish != "ucx":
        return ok(f"MPI{asked}: {info.name} connects the ranks")
    who = info.name if info is not None else "distopt run, torchrun and srun"
    if wish in ("mpi", "hierarchical"):
        return failed(
            f"DISTOPT_TRANSPORT={wish}: {who} cannot connect the ranks of MPI", "start with mpiexec, or unset it"
        )
    try:
        found = ask("ucx")
    except DistoptError as error:
        fact = f"none under {who}: {str(error).partition(': ')[2] or error}"
        return absent(fact, f"{_INSTALL}, or start with mpiexec, which takes MPI")
    others = "" if info is not None else "; mpiexec takes MPI"
    where = _interface(met.address if met is not None and not met.one_host else "")
    return ok(f"UCX {found['version']}{asked} under {who}, {where}{others}")


def _interface(peer: str) -> str:
    """By which network interface this host would be reached, and why."""
    from ...launch.addresses import named_interface, own_interfaces, route_to

    if named := named_interface():
        return f"by interface {named} (GLOO_SOCKET_IFNAME)"
    known = own_interfaces()
    route = route_to(peer) if peer else ""
    why = f"on the route to {peer}" if route else "its first address; the route to the other hosts decides"
    address = route or next((address for _, address in known), "")
    name = next((name for name, known_address in known if known_address == address), "")
    return f"by interface {name} ({address}, {why})" if name else "but no network interface has an address"


def _mpi_library() -> str:
    with suppress(ImportError, DistoptError):
        return str(ask("mpi")["library"])
    return ""
