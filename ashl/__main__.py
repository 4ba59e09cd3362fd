"""Run the command line: `python -m ashl`."""

import sys

from ashl.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
