"""`gangs.node`, by the name that a driver started before an update of Muster still calls."""

from __future__ import annotations

import sys

from muster.api.gangs.node import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
