"""Train with the wheel in dist in a bare Debian, without a compiler: python -m release.bare [SUITE]

The tree has Debian's minimal system and its Python; all else comes from a folder of wheels, without a network. Needs
root (`chroot`), debootstrap, and the data set in $DISTOPT_DATA_DIR; PyTorch is the version that tests compare with.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .versions import ROOT, debian_site, wheel_for

WORK = ROOT / "build" / "bare"
DEBIAN_PACKAGES = ("python3", "python3-venv")
EXTRAS = "mpi,torch,oracle"
# README's three ways to start, for one epoch.
JOBS = (
    "python examples/mnist_multiprocess.py 2 --max-epoch 1",
    "mpiexec --hostfile examples/hosts python examples/mnist_dist.py --max-epoch 1",
    "DISTOPT_AS_GLOO=1 torchrun --nproc-per-node 2 examples/pytorch/mnist_ddp.py --backend gloo --epochs 1",
)
# Run in mount and process namespaces of its own, so that nothing stays mounted.
ENTER = """
mount --rbind /dev "$0/dev"
mount --rbind /sys "$0/sys"
mount -t proc proc "$0/proc"
exec chroot "$0" /bin/sh -ec "$1"
"""
# The wheels lie in /wheels, the examples and the data set in /project.
SCRIPT = """\
! command -v cc gcc c++ clang make
python3 -m venv /env
. /env/bin/activate
pip install --quiet --no-index --find-links /wheels '/wheels/{wheel}[{extras}]'
cd /project
export DISTOPT_DATA_DIR=/project/data
distopt doctor
{jobs}
"""


def fill(tree: Path, dist: Path, data: Path) -> str:
    """Copy the wheel with all that it needs, the examples and the data set into the tree; the name of the wheel."""
    version = (tree / "usr" / "bin" / "python3").readlink().name.removeprefix("python")  # 3.11
    wheel = wheel_for(version, os.uname().machine, dist)
    wanted = ("--only-binary", ":all:", "--python-version", version, "--dest", tree / "wheels")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *wanted, f"distopt-train[{EXTRAS}] @ {wheel.as_uri()}"],
        check=True,
    )
    shutil.copytree(ROOT / "examples", tree / "project" / "examples")
    shutil.copytree(data, tree / "project" / "data")
    return wheel.name


def main() -> None:
    """Make the tree, install and train; exits with 1 if a step fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", nargs="?", default="bookworm", help="a release of Debian (default: %(default)s)")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    if shutil.which("debootstrap") is None or os.getuid() != 0:
        sys.exit("bare: needs root, and debootstrap: apt-get install debootstrap, on Debian")
    if "DISTOPT_DATA_DIR" not in os.environ:
        sys.exit("bare: set DISTOPT_DATA_DIR to the folder of MNIST's four files")
    tree = WORK / options.suite
    shutil.rmtree(tree, ignore_errors=True)
    made = ("debootstrap", "--variant=minbase", f"--include={','.join(DEBIAN_PACKAGES)}", options.suite, tree)
    subprocess.run([*made, debian_site()], check=True, stdout=subprocess.DEVNULL)
    # As Debian's installer does; torchrun looks up both names.
    (tree / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n")
    wheel = fill(tree, options.dist.resolve(), Path(os.environ["DISTOPT_DATA_DIR"]))
    script = SCRIPT.format(wheel=wheel, extras=EXTRAS, jobs="\n".join(JOBS))
    entered = ("unshare", "--mount", "--pid", "--fork", "sh", "-ec", ENTER, tree, script)
    sys.exit(subprocess.run(["env", "--ignore-environment", f"PATH={os.defpath}:/sbin:/usr/sbin", *entered]).returncode)


if __name__ == "__main__":
    main()
