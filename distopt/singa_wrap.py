"""SINGA's `singa_wrap` module, under the name that scripts import: `distopt.singa.singa_wrap`."""

import sys
from typing import TYPE_CHECKING

from .singa import singa_wrap

if TYPE_CHECKING:
    from .singa.singa_wrap import *  # noqa: F403

sys.modules[__name__] = singa_wrap
