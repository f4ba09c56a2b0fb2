"""SINGA's `model` module, under the name that scripts import: `distopt.singa.model`."""

import sys
from typing import TYPE_CHECKING

from .singa import model

if TYPE_CHECKING:
    from .singa.model import *  # noqa: F403

sys.modules[__name__] = model
