"""SINGA's `layer` module, under the name that scripts import: `distopt.singa.layer`."""

import sys
from typing import TYPE_CHECKING

from .singa import layer

if TYPE_CHECKING:  # mypy does not follow a sum of lists in `__all__`
    from .nn.layers.convolution import *  # noqa: F403
    from .nn.layers.linear import *  # noqa: F403
    from .nn.layers.normalization import *  # noqa: F403
    from .nn.layers.pooling import *  # noqa: F403
    from .nn.layers.without_parameters import *  # noqa: F403
    from .singa.layer import *  # noqa: F403

sys.modules[__name__] = layer
