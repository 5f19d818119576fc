"""The error of a failed Spark job: what our own code raised on an executor, if it did."""

import re

from evenstep.core.errors import ConfigError, EvenstepError, UnsupportedError

__all__ = ["said_in"]

_OURS = {"ConfigError": ConfigError, "UnsupportedError": UnsupportedError}
_SENTENCE = re.compile(r"^(?:\w+\.)*(" + "|".join(_OURS) + r"): (.+?)$", re.MULTILINE)


def said_in(error: Exception) -> EvenstepError:
    """The error that our code raised on an executor, or else one with Spark's own message."""
    text = str(error)
    found = _SENTENCE.search(text)
    return _OURS[found[1]](found[2]) if found else EvenstepError(f"the Spark job failed: {text}")
