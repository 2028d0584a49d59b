"""``python -m rlt_sb3`` is ``rlt``."""

import sys

from rlt_sb3.cli.main import main

sys.exit(main())
