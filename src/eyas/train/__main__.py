"""`python -m eyas.train RECIPE [key=value ...]`"""

from __future__ import annotations

import sys

from eyas.train.recipes import run_recipe

if len(sys.argv) < 2:
    sys.exit(__doc__)
run_recipe(sys.argv[1], sys.argv[2:])
