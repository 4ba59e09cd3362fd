"""Entry point of `python -m ashl.cli`, by which torchrun starts ashl on every rank."""

import sys

from ashl.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
