"""Entry point of `ashl` and of `python -m ashl.cli`, by which torchrun starts every rank."""

import sys


def start() -> int:
    """Run the command line. An interrupt while it is imported ends it in one sentence, too."""
    try:
        from ashl.cli.app import main
    except KeyboardInterrupt:
        print("ashl: interrupted", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(start())
