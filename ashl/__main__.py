"""Run the command line: `python -m ashl`."""

import sys

from ashl.cli.__main__ import start

if __name__ == "__main__":
    sys.exit(start())
