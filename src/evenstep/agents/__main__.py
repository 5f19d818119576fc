"""A process that `process.begin` started: `python -m evenstep.agents MODULE PARENT WORDS...`."""

import sys

from evenstep.agents.process import serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
