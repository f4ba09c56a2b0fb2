"""`tests/gpu/test_codec_kernels.py` on the emulated GPU, in a process of its own."""

import subprocess
import sys

import pytest

from tests.emulation import build

RUN = """
import sys, pytest
from tests.emulation import activate
activate()
sys.exit(pytest.main([*sys.argv[1:], "-q", "-x", "-p", "no:cacheprovider"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first test of a session compiles the emulator
def test_the_kernels_of_the_codecs_on_the_emulated_gpu():
    build.build()
    ended = subprocess.run(
        [sys.executable, "-c", RUN, "tests/gpu/test_codec_kernels.py"], cwd=build.ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout, ended.stdout
