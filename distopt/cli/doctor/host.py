"""Probes of Python, NumPy, the native module, and the machine: cores, shared memory, name, launcher."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import sys
from pathlib import Path

from ...autoload import AS_GLOO, is_in_gloos_place
from ...errors import DistoptError, LaunchError, pip_install
from ...settings import Settings
from .ask import ask, version_of
from .report import Finding, absent, failed, ok

_REQUIRED = ("numpy", "threadpoolctl")
_PR_GET_CHILD_SUBREAPER = 37  # linux/prctl.h
_SHM = Path("/dev/shm")
_PROBE_BYTES = 1 << 20
_IMPORT_SECONDS = 60.0
_RESOLVE_SECONDS = 5.0  # then the doctor reports that the name has no address


# -- software ----------------------------------------------------------------------------------------------------------
def python() -> Finding:
    """The version and the path of the interpreter."""
    return ok(f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}")


def operating_system() -> Finding:
    """The operating system, which must be Linux."""
    libc = " ".join(platform.libc_ver())
    found = f"{platform.system()} {platform.release()}, {platform.machine()}, {libc or 'unknown C library'}"
    if sys.platform != "linux":
        return failed(found, "use Linux: shared memory between ranks relies on memfd, futexes and /proc")
    return ok(found)


def settings() -> Finding:
    """The variables DISTOPT_* that are set, and whether their values are valid."""
    given = {name: value for name, value in os.environ.items() if name.startswith("DISTOPT_")}
    if "DISTOPT_JOB_SECRET" in given:
        given["DISTOPT_JOB_SECRET"] = "..."
    try:
        Settings.from_env()
    except DistoptError as error:
        return failed(str(error), "correct or unset it")
    return ok(" ".join(f"{name}={value}" for name, value in given.items()) or "no DISTOPT_* variable is set")


def packages() -> Finding:
    """The packages that distopt requires."""
    versions: dict[str, str | None] = {name: version_of(name) for name in _REQUIRED}
    missing = [name for name, found in versions.items() if found is None]
    if missing:
        return failed(f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return ok(", ".join(f"{name} {found}" for name, found in versions.items()))


def numpy() -> Finding:
    """Whether NumPy can be imported."""
    try:
        answer = ask("numpy")
    except (ImportError, DistoptError) as error:
        return failed(str(error), "pip install --force-reinstall numpy")
    return ok(f"{answer['version']}, {answer['path']}")


def core() -> Finding:
    """The native module: compiler, flags, instruction sets."""
    try:
        answer = ask("core")
    except (ImportError, DistoptError) as error:
        return failed(
            str(error), "build it anew, in the folder of its source: pip install --force-reinstall --no-deps ."
        )
    isas = ", ".join(f"[{isa}]" if isa == answer["isa"] else isa for isa in answer["isas"])
    return ok(f"{answer['compiler']}, {answer['flags']}; instruction sets: {isas}")


def torch() -> Finding:
    """PyTorch, and whose groups it makes by the name "gloo"."""
    try:
        answer = ask("torch", seconds=_IMPORT_SECONDS)
    except ModuleNotFoundError:
        return absent("not installed", pip_install("torch"))
    except DistoptError as error:
        return failed(str(error), "pip install --force-reinstall torch")
    ours, asked = answer["gloo"] == "distopt", is_in_gloos_place()
    whose = "distopt's" if ours else "Gloo's"
    by = f"{AS_GLOO}={os.environ[AS_GLOO]}" if AS_GLOO in os.environ else f"without {AS_GLOO}=1"
    found = f'{answer["version"]}; groups for CPU tensors that ask for "gloo" are {whose} ({by})'
    if asked and not ours:
        return failed(found, "unset TORCH_DEVICE_BACKEND_AUTOLOAD=0, and install distopt, not only its folder")
    return ok(found)


# -- machine -----------------------------------------------------------------------------------------------------------
def cores() -> Finding:
    """Cores of the host, cores that this process may use, and the CPU quota of its control group."""
    count = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    found = f"{count} on this host, {usable} usable"
    if quota is not None:
        found += f", {quota:g} granted by the control group"
    limit = usable if quota is None else min(usable, quota)
    cure = ""
    if limit < usable:
        cure = f"start at most {max(1, int(limit))} ranks here: more would be stopped in turn when the quota is used up"
    elif usable < count:
        cure = f"start at most {usable} ranks here, or lift the affinity (taskset, the container's cpuset)"
    return ok(found, cure)


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """CPU quota of this process's control groups, in cores; None without a limit.

    Reads version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`), from this process's group up to the root; the
    smallest limit applies. In a container, the process's own group is mounted as the root.
    """
    limits: list[float | None] = []
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        relative = Path(path.lstrip("/"))
        groups = (base / relative, *(base / parent for parent in relative.parents))
        limits += [_group_quota(group, bool(controllers)) for group in groups]
    return min((limit for limit in limits if limit is not None), default=None)


def _group_quota(folder: Path, version_1: bool) -> float | None:
    try:
        if version_1:
            quota, period = ((folder / f"cpu.cfs_{part}_us").read_text().strip() for part in ("quota", "period"))
        else:
            quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):  # the root group has no such file
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def shared_memory() -> Finding:
    """Memory for the ranks to share: memfd or, without it, space in /dev/shm."""
    size, free = (None, None)
    if _SHM.is_dir():
        stat = os.statvfs(_SHM)
        size, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    place = "no /dev/shm" if size is None else f"/dev/shm of {_size(size)}, {_size(free or 0)} free"
    try:
        with os.fdopen(os.memfd_create("distopt-doctor", os.MFD_CLOEXEC), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, _PROBE_BYTES)
    except OSError as error:
        reason = f"memfd_create is not allowed ({error.strerror})"
        if free is not None and free >= _PROBE_BYTES and os.access(_SHM, os.W_OK):
            advice = (
                "allow memfd_create (the container's seccomp profile), or enlarge /dev/shm (docker run --shm-size=8g)"
            )
            return ok(f"{place}; {reason}, so the ranks' buckets must fit there", advice)
        return failed(f"{place}; {reason}", "allow memfd_create, or give /dev/shm room (--shm-size=8g)")
    return ok(f"memfd, not limited by the size of /dev/shm ({place})")


def healing() -> Finding:
    """How `distopt run --heal` would start ranks again."""
    if ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(ctypes.c_int()), 0, 0, 0):
        return absent("distopt run --heal starts ranks by exec, in seconds: processes cannot be subreapers here")
    return ok("distopt run --heal starts ranks by a fork, in fractions of a second")


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def host_name() -> Finding:
    """Whether the host's own name resolves to an address; some MPI launchers need that."""
    name = socket.gethostname()
    try:
        addresses = ask("resolve", name, seconds=_RESOLVE_SECONDS)["addresses"]
    except DistoptError as error:
        return failed(f"{name} does not resolve ({error})", f"add the line '127.0.1.1 {name}' to /etc/hosts")
    return ok(f"{name} is {', '.join(addresses)}")


def launcher_variables() -> Finding:
    """The launcher that started this process, according to its environment variables."""
    from ...launch.launchers import launcher  # not before the probe runs: the package may be incomplete
    from ...launch.rendezvous.meeting import meeting

    try:
        info = launcher()
        place = meeting(info) if info is not None else None
    except LaunchError as error:
        return failed(str(error), "start the job with one launcher only")
    if info is not None:
        how = "its MPI connects the ranks"
        if place is not None:
            how = "ranks of one host, by shared memory" if place.one_host else f"rank 0 on {place.address}"
        return ok(f"{info.name}: {info.source}; {how}")
    if "SLURM_JOB_ID" in os.environ:
        return ok(f"inside Slurm job {os.environ['SLURM_JOB_ID']}, outside a step", "start the ranks with srun")
    return absent("none: this process was started by hand")
