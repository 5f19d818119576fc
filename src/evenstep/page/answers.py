"""What the page and the command line can ask of a running job, and the answers."""

from typing import Any, Protocol

from evenstep.core.errors import ConfigError

__all__ = ["Asked", "answer"]


class Asked(Protocol):
    """What answers for a job: its supervisor, or the job itself."""

    def scale(self, number: int) -> str:
        """Have this many workers from the next step on; returns a sentence that says so.

        Raises:
            ConfigError: There cannot be that many.
        """

    def ask_for_checkpoint(self) -> None:
        """Have a checkpoint written after this step."""

    def ask_for_fingerprint(self) -> None:
        """Have the fingerprint taken after this step."""

    def stop(self) -> None:
        """Stop after this step."""

    def status(self) -> dict[str, Any]:
        """What there is to see, as JSON."""


def answer(asked: Asked, request: dict[str, Any]) -> dict[str, Any]:
    """Do what a request asks for; returns the answer, which is the status if it asks for nothing else."""
    if "scale" in request:
        number = request["scale"]
        if not isinstance(number, int) or isinstance(number, bool):
            return {"error": f"scale is {number!r:.60}, expected a whole number of workers"}
        try:
            return {"said": asked.scale(number)}
        except ConfigError as error:
            return {"error": str(error)}
    if "checkpoint" in request:
        asked.ask_for_checkpoint()
        return {"said": "a checkpoint is written after this step, if the script calls run.checkpoint"}
    if "fingerprint" in request:
        asked.ask_for_fingerprint()
        return {"said": "the fingerprint is taken after this step"}
    if "stop" in request:
        asked.stop()
        return {"said": "stopping after this step"}
    return asked.status()
