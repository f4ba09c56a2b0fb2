"""Scripts that just end do so with code 0; see `ends.py`, which repeats this many times."""

import pytest

pytest.importorskip("torch")

from .ends import LAUNCHERS, PROGRAMS, run


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("destroys", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_job_ends(program: str, destroys: bool) -> None:
    launcher = LAUNCHERS[(list(PROGRAMS).index(program) + destroys) % len(LAUNCHERS)]
    code, text = run(launcher, 2, program, destroys=destroys)
    assert code == 0, text
    assert "Traceback" not in text, text
