"""What Spark says of a failed job, with what our own code said first."""

import re

from evenstep.core.errors import ConfigError, EvenstepError, UnsupportedError

__all__ = ["said_in"]

_OURS = {"ConfigError": ConfigError, "UnsupportedError": UnsupportedError}
_SENTENCE = re.compile(r"^(?:\w+\.)*(" + "|".join(_OURS) + r"): (.+?)$", re.MULTILINE)


def said_in(error: Exception) -> EvenstepError:
    """The error that our code raised on an executor; else one that has all of Spark's words."""
    text = str(error)
    found = _SENTENCE.search(text)
    return _OURS[found[1]](found[2]) if found else EvenstepError(f"the Spark job failed: {text}")
