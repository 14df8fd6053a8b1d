"""`python -m runtime` is `outrider`."""

import sys

from runtime.cli import main

if __name__ == "__main__":
    sys.exit(main())
