"""Launching where something that most programs count on is missing or odd."""

import shlex
import subprocess
import sys

import pytest

from tests.faults.ways import can_mount
from tests.processes import ROOT, Program

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

MAIN = str(ROOT / "tests" / "ranks" / "launched_main.py")
SUMS = ["[rank 1] rank 1 of 2: sum 3", "rank 0 of 2: sum 3"]
LAUNCHERS = {
    "launch.main": [sys.executable, MAIN, "2"],
    "distopt run": [sys.executable, "-m", "distopt", "run", "--nproc-per-node", "2", MAIN, "2"],
}


def sh(text: str) -> list[str]:
    return ["sh", "-c", f'{text} exec "$@"', "sh"]


ENVIRONMENTS = {
    # But for the one by which processes are found.
    "no variables": sh(f'exec env -i PYTHONPATH={shlex.quote(str(ROOT))} DISTOPT_TEST_RUN="$DISTOPT_TEST_RUN" "$@";'),
    "no HOME, no PATH, no TMPDIR": ["env", "-u", "HOME", "-u", "PATH", "TMPDIR=/nowhere"],
    "C locale": ["env", "LC_ALL=C", "LANG=C", "PYTHONUTF8=0", "PYTHONIOENCODING=ascii"],
    "no user's files": sh("umask 777;"),
    "a folder that has been removed": sh('folder=$(mktemp -d) && cd "$folder" && rmdir "$folder" &&'),
    "the root folder": sh("cd / &&"),
    "stdin closed": sh("exec <&-;"),
    "stdin without end": sh("exec </dev/zero;"),
    "lowest priority": ["nice", "-n", "19"],
    "one core": ["taskset", "-c", "0"],
    "signals ignored": ["env", "--ignore-signal=HUP,PIPE,CHLD"],
    "signals blocked": ["env", "--block-signal=HUP,USR1,USR2,CHLD"],
    "many descriptors": sh("exec 3<&0 4<&0 5<&0 6<&0 7<&0 8<&0 9<&0;"),
    "other warnings": ["env", "PYTHONWARNINGS=default", "PYTHONFAULTHANDLER=1", "PYTHONDONTWRITEBYTECODE=1"],
    "a WORLD_SIZE of the job script": ["env", "WORLD_SIZE=7", "MASTER_ADDR=nowhere.invalid", "MASTER_PORT=1"],
    "a network namespace without interfaces": ["unshare", "--net"],
    "a process namespace": ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"],
    "a user namespace": ["unshare", "--user", "--map-root-user"],
    "a host name that nobody knows": ["unshare", "--uts", "sh", "-c", 'hostname no.such-host && exec "$@"', "sh"],
    "a file system that is read only": [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -o remount,bind,ro / && exec "$@"',
        "sh",
    ],
    "no /dev/shm": ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"', "sh"],
}


# Where launch.main starts processes in other ways than distopt run does.
OF_MAIN = (
    "no variables",
    "C locale",
    "stdin closed",
    "signals ignored",
    "a process namespace",
    "a file system that is read only",
    "no /dev/shm",
)


@pytest.mark.sweep(rest=5)
@pytest.mark.parametrize(
    ("name", "launcher"),
    [*((name, "distopt run") for name in ENVIRONMENTS), *((name, "launch.main") for name in OF_MAIN)],
)
def test_ranks_start_and_meet(name, launcher):
    prefix = ENVIRONMENTS[name]
    if prefix[0] == "unshare":
        if not can_mount():
            pytest.skip("namespaces take privileges")
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip(f"this machine does not have: {name}")
    ended = Program([*prefix, *LAUNCHERS[launcher]]).end()
    assert ended.code == 0, ended
    assert sorted(ended.stdout.splitlines()) == SUMS


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_behind_odd_paths(tmp_path, launcher):
    folder = tmp_path / "a folder, 'quoted' é\n"
    folder.mkdir()
    script = folder / "my script.py"
    script.write_text((ROOT / "tests" / "ranks" / "launched_main.py").read_text())
    command = [str(script) if word == MAIN else word for word in LAUNCHERS[launcher]]
    ended = Program(command).end()
    assert ended.code == 0, ended
    assert sorted(ended.stdout.splitlines()) == SUMS
