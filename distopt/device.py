"""SINGA's `device` module, under the name that scripts import: `distopt.singa.device`."""

import sys

from .singa import device
from .singa.device import *  # noqa: F403 - for type checkers

sys.modules[__name__] = device
