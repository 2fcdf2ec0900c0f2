"""`python -m codistill`: the command line."""

import sys

from codistill.cli import main

if __name__ == "__main__":
    sys.exit(main())
