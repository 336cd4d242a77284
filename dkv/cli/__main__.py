"""``python -m dkv.cli``."""

import sys

from dkv.cli import main

sys.exit(main())
