"""How Lightning's entry points (fit, validate, test, predict) become runs, in as many processes as were asked for."""

from collections.abc import Callable
from typing import Any, Protocol

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.subprocess_script import _launch_process_observer, _SubprocessScriptLauncher

from evenstep.core import env

__all__ = ["Launcher", "Runs"]


class Runs(Protocol):
    """Something that makes runs."""

    def within(self, trainer: Trainer, function: Callable[[], Any]) -> Any:
        """Call a function within a run of its own."""


class Launcher(_SubprocessScriptLauncher):
    """Starts the script again for every further worker, if nobody else has, and makes every entry point a run.

    Args:
        strategy: Makes runs.
        cluster_environment: Lightning's, which knows addresses and ranks.
        num_processes: How many workers Lightning was asked for.
        launched: Whether `evenstep run` or torchrun has started this process.
    """

    def __init__(
        self, strategy: Runs, cluster_environment: ClusterEnvironment, num_processes: int, *, launched: bool
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes=1)
        self._strategy, self._launched = strategy, launched

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook can do this: no, since it is not a script that could be started again."""
        return self._launched or self.num_processes == 1

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """See `_Launcher`."""
        assert trainer is not None, "entry points belong to a trainer"
        if not self._launched and self.num_processes > 1:
            if not self.cluster_environment.creates_processes_externally:
                self._call_children_scripts()
                _launch_process_observer(self.procs)
            env.write({"RANK": str(self.cluster_environment.local_rank())})  # with what Lightning says, as torchrun's
        return self._strategy.within(trainer, lambda: function(*args, **kwargs))
