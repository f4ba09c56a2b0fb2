"""The kernels under NVIDIA's compute-sanitizer, which is a part of the CUDA toolkit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import require_gpu

require_gpu()

SECONDS = 3000  # it slows kernels down 10 to 100 times
TOOLKIT = "/usr/local/cuda/bin"


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("tests", ["test_codec_kernels.py", "test_ops.py", "test_convolution.py"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_kernels_under(tool, tests):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=TOOLKIT)
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer; add the bin folder of the CUDA toolkit to PATH")
    # CuPy asks the runtime questions whose answer may be an error; those of kernels count.
    options = ["--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    pytest_command = [sys.executable, "-m", "pytest", "-q", f"--timeout={SECONDS}", str(Path(__file__).parent / tests)]
    ran = subprocess.run([sanitizer, *options, *pytest_command], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
