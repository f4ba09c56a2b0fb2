"""`python -m distopt.cli`, for use when the console script is not on the PATH."""

import sys

from . import main

sys.exit(main())
