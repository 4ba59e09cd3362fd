"""`python -m ashl.cli`, which is how torchrun starts it on every rank."""

import sys

from ashl.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
