"""`python -m evenstep` is the command line."""

import sys

from evenstep.cli.main import main

sys.exit(main())
