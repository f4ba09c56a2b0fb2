"""The process group against what one process computes, and against Gloo; `checks` has the ranks' side."""

import pytest

pytest.importorskip("torch")
from tests.parts import values_beside

from .checks import BY_MAKE_TORCH, CHECKS, FAR, GROUPS
from .checks.__main__ import outcomes

NAMES = [
    pytest.param(name, marks=() if name in FAR else pytest.mark.sweep) for name in CHECKS if name not in BY_MAKE_TORCH
]


def expect_no_error(found: dict[str, dict[int, str]], name: str, ranks: str) -> None:
    errors, size = found.get(name, {}), sum(map(int, ranks.split("+")))
    assert len(errors) == size, f"only {len(errors)} of {size} ranks have ended {name}; see what fails before"
    for rank, error in errors.items():
        assert not error, f"rank {rank}\n{error}"


@pytest.mark.parametrize("ranks", ["2", pytest.param("3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_check(request, once, name: str, ranks: str) -> None:
    number, group = next((number, group) for number, group in enumerate(GROUPS) if name in group)
    checks = tuple(each for each in values_beside(request, "name") if each in group)
    expect_no_error(once(f"torch-{ranks}-{number}", outcomes, ranks, checks), name, ranks)
