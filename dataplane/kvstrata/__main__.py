"""`python -m kvstrata`."""

import sys

from kvstrata.cli import main

if __name__ == "__main__":  # a spawned process imports this module again
    sys.exit(main())
