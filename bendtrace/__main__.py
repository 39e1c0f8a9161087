"""`python -m bendtrace`."""

import sys

from bendtrace.cli import main

if __name__ == "__main__":
    sys.exit(main())
