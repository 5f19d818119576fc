"""Python imports this first in pytest's process and in all that tests start: torch is imported a fifth faster.

What so many modules create is there to stay, and whoever looks for garbage in it again and again finds none.
"""

import gc

gc.set_threshold(50_000, 20, 50)
