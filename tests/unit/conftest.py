import pytest

from distopt.launch.end_together import siblings


@pytest.fixture
def no_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other workers of pytest-xdist are siblings of this process, and may end."""
    monkeypatch.setattr(siblings, "_seen", set())
    monkeypatch.setattr(siblings, "_siblings", lambda: (set(), set()))


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No notice has been given yet; and no variable names a device."""
    monkeypatch.setattr("distopt.nn.notices._logged", set())
    monkeypatch.delenv("DISTOPT_DEVICE", raising=False)
