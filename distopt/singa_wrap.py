"""SINGA's `singa_wrap` module, under the name that scripts import: `distopt.singa.singa_wrap`."""

import sys

from .singa import singa_wrap
from .singa.singa_wrap import *  # noqa: F403 - for type checkers

sys.modules[__name__] = singa_wrap
