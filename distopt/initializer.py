"""SINGA's `initializer` module, under the name that scripts import: `distopt.singa.initializer`."""

import sys

from .singa import initializer
from .singa.initializer import *  # noqa: F403 - for type checkers

sys.modules[__name__] = initializer
