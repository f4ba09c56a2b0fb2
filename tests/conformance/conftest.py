import pytest

from instruments.emulation import build


@pytest.fixture(scope="session")
def built() -> None:
    """The emulated GPU is compiled."""
    build.build()
