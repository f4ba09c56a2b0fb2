"""SINGA's `device` module, under the name that scripts import: `distopt.singa.device`."""

import sys
from typing import TYPE_CHECKING

from .singa import device

if TYPE_CHECKING:
    from .singa.device import *  # noqa: F403

sys.modules[__name__] = device
