"""What can be asked of a running job, by its page and by the command line, and how it is answered."""

from typing import Any, Protocol

from evenstep.core.errors import ConfigError

__all__ = ["Asked", "answer"]


class Asked(Protocol):
    """Whoever answers for a job: its supervisor, or the job itself."""

    def scale(self, number: int) -> str:
        """Have so many workers from the next step on; says so.

        Raises:
            ConfigError: There cannot be so many.
        """

    def ask_for_checkpoint(self) -> None:
        """Have one written after this step."""

    def ask_for_fingerprint(self) -> None:
        """Have it taken after this step."""

    def stop(self) -> None:
        """Stop after this step."""

    def status(self) -> dict[str, Any]:
        """What there is to see, as JSON."""


def answer(asked: Asked, request: dict[str, Any]) -> dict[str, Any]:
    """Do what a request asks for; returns what is said to it. One that asks for nothing else gets the status."""
    if "scale" in request:
        try:
            return {"said": asked.scale(int(request["scale"]))}
        except (ConfigError, TypeError, ValueError) as error:
            return {"error": str(error)}
    if "checkpoint" in request:
        asked.ask_for_checkpoint()
        return {"said": "a checkpoint is written after this step, if the script has said where"}
    if "fingerprint" in request:
        asked.ask_for_fingerprint()
        return {"said": "the fingerprint is taken after this step"}
    if "stop" in request:
        asked.stop()
        return {"said": "stopping after this step"}
    return asked.status()
