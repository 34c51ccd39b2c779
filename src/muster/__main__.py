"""``python -m muster`` is ``muster``."""

from __future__ import annotations

import sys

from muster.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
