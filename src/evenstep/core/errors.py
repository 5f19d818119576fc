"""The one error tree. Each class is a cause that a caller would treat differently; the CLI gives each its exit code."""

__all__ = [
    "BeginsAgain",
    "CheckpointError",
    "ConfigError",
    "Dismissed",
    "EvenstepError",
    "MismatchError",
    "NondeterminismError",
    "PeerError",
    "RefusedError",
    "ServerError",
    "SilenceError",
    "Stopped",
    "UnreachableError",
    "UnsupportedError",
    "WrongError",
]


class EvenstepError(Exception):
    """The root of all errors that evenstep raises.

    Attributes:
        exit_code: The exit code of a command that raises it.
        was_shown: Whether the user has read the message already.
    """

    exit_code = 1
    was_shown = False


class ConfigError(EvenstepError):
    """An option, argument or environment variable does not make sense; nothing has been started."""

    exit_code = 2


class UnsupportedError(EvenstepError):
    """A model, optimizer or tensor of a kind that evenstep cannot train exactly."""

    exit_code = 3


class NondeterminismError(EvenstepError):
    """Something that exactness depends on was changed during a run, such as the number of threads."""

    exit_code = 4


class MismatchError(EvenstepError):
    """Two participants reached different exchanges, so adding what they offer would mix unrelated things."""

    exit_code = 5


class SilenceError(EvenstepError):
    """A participant did not come to an exchange within the timeout."""

    exit_code = 6


class PeerError(EvenstepError):
    """Another worker failed. Its own error, with its traceback, is the end of the message.

    Attributes:
        worker: The number of the worker that failed first.
    """

    exit_code = 7

    def __init__(self, message: str, worker: int) -> None:
        super().__init__(message)
        self.worker = worker


class CheckpointError(EvenstepError):
    """A checkpoint is missing, torn, altered, or belongs to another model, seed or number of shards."""

    exit_code = 8


class ServerError(EvenstepError):
    """A parameter server could not do what it was asked."""

    exit_code = 9


class RefusedError(ServerError):
    """The server refused a request: it is wrong, not allowed, or comes at the wrong time. Its state is unchanged.

    Attributes:
        status: The HTTP status: 400 malformed, 401 no token, 404 unknown, 409 at the wrong time, 410 not
            registered any more, 413 too large, 422 not finite, 503 too busy.
    """

    exit_code = 10

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(ServerError):
    """There is no server at the address, or it went away and did not come back in time."""

    exit_code = 11


class WrongError(EvenstepError):
    """A machine computed wrong, or its memory no longer holds what was written, and this cannot be repaired here."""

    exit_code = 12


class Stopped(SystemExit):
    """The run was asked to stop, and did so after a step. Not an error: it unwinds the script as `sys.exit` does."""

    exit_code = 75  # EX_TEMPFAIL: try again later

    def __init__(self) -> None:
        super().__init__(self.exit_code)


class BeginsAgain(SystemExit):
    """The state that this worker was to join is lost; a worker started afresh can join. Not an error."""

    exit_code = 76

    def __init__(self) -> None:
        super().__init__(self.exit_code)


class Dismissed(SystemExit):
    """There are to be fewer workers, and this one leaves. Not an error."""

    def __init__(self) -> None:
        super().__init__(0)
