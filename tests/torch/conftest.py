from collections.abc import Iterator

import pytest

from tests.ranks.conftest import script, start  # noqa: F401 - fixtures


@pytest.fixture
def alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process group of one rank: of distopt, or of the backend that is the parameter."""
    import torch.distributed as dist

    dist.init_process_group(getattr(request, "param", "distopt"), store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
