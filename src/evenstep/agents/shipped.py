"""The script of workers that call a function: `python -m evenstep.agents.shipped FUNCTION-FILE RESULT-FILE`."""

import sys

from evenstep.agents.shipping import call
from evenstep.core import env

if __name__ == "__main__":
    call(sys.argv[1], sys.argv[2], env.read().worker)
