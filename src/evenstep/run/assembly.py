"""The parts of a run: opened together, and closed in reverse order, even if opening them fails halfway."""

from collections.abc import Callable
from contextlib import ExitStack

from evenstep.core import points
from evenstep.core.config import RunConfig
from evenstep.core.env import Environment
from evenstep.core.events import send
from evenstep.engine.randomness import seed_all
from evenstep.exchange.ledger import Ledger
from evenstep.plan.groups import Standing
from evenstep.run import unclosed
from evenstep.run.agreement import agree
from evenstep.run.digests import DigestWriter
from evenstep.run.ending import end
from evenstep.run.evaluation import Evaluation
from evenstep.run.feed import Feed
from evenstep.run.join import alone, is_alone, join
from evenstep.run.kinds import open_engine
from evenstep.run.last_words import log_last
from evenstep.run.meter import Meter
from evenstep.run.operations import RunOperations
from evenstep.run.porter import open_page
from evenstep.run.progress import Display, Pipe
from evenstep.run.saving import Saving
from evenstep.run.server import Server
from evenstep.run.voice import Voice

__all__ = ["Assembly"]


class Assembly:
    """Everything that a `Run` hands its calls to. All workers must make it alike; it waits for all of them.

    Args:
        config: The settings of the run.
        env: What the launcher says.
        server: The parameter server at which workers meet, if any.
        standing: The position of the group among others, if the launcher has started servers.
        page: The port of a page of the run; 0: any; None: no page.
        progress: Whether there is a progress display.

    Attributes:
        worker: The number of this worker in its group.
        group: The number of its group.
        num_groups: How many groups there are.
        speaks: Whether this worker may speak for the whole run.
        ledger: What the workers have done, and who they are.
        operations: What the workers do alike.
        engine: Computes and commits steps.
        others: Those who train the same model elsewhere.
        voice: Prints in the name of the run.
        digests: Writes down digests of the state, if asked to.
        saving: Checkpoints.
        meter: Mean losses and metrics, and the progress.
        feed: Batches.
        evaluation: Evaluations and predictions.
    """

    def __init__(
        self,
        config: RunConfig,
        env: Environment,
        server: Server | None,
        standing: Standing | None,
        *,
        page: int | None,
        progress: bool,
    ) -> None:
        self._config, self._env = config, env
        apart = server is not None and not server.together
        self.group, self.num_groups = (standing.group, standing.groups) if standing is not None else (0, 1)
        with ExitStack() as opened:
            self.ledger = self._meet(opened, apart=apart)
            self.worker = env.worker if apart else self.ledger.group.worker
            shows = not (apart and self.worker > 0)  # the progress of every group is shown, as one
            self.speaks = self.group == 0 and shows
            self.operations = RunOperations(self.ledger, self.worker)
            with self.operations.alike():
                self.engine, self.others = open_engine(config, self.ledger, server, standing, env)
                opened.callback(self.engine.close)
                self.operations.version = lambda: self.engine.version
                self.operations.check_untouched = lambda: self.engine.check_untouched(self.engine.optimizers)
                self._compose(opened)
                self._begin(progress=progress and shows)
                port = page and page + self.group  # every group has its own; 0: any
                porter = open_page(port, env, self.ledger.group, config.shards, served=server is not None)
                if porter is not None:
                    opened.callback(porter.close)
            self._opened = opened.pop_all()

    def _meet(self, opened: ExitStack, *, apart: bool) -> Ledger:
        timeout_s = self._config.timeout_s
        if not apart and not is_alone(self._env):
            return join(self._env, timeout_s)  # stays open: another run of this process may continue in it
        ledger = alone(self._env, timeout_s)
        opened.callback(ledger.group.close)
        return ledger

    def _compose(self, opened: ExitStack) -> None:
        """Make the parts around the engine."""
        env, perform, place = self._env, self.operations.perform, (self.group, self.num_groups)
        self.voice = Voice(env, self.ledger, speaks=self.speaks)
        self.digests = DigestWriter(env.digests, self.engine)
        self.saving = Saving(self.engine, self.others, perform, env.job)
        opened.callback(self.saving.close)
        self.meter = Meter(lambda: self.ledger.group.rank == 0 and self.ledger.took_part)
        opened.callback(self.meter.close)
        self.feed = Feed(self.engine, env, self.saving, self.meter, perform, place)
        self.evaluation = Evaluation(self.engine, self.others, self.feed, perform, place)
        opened.callback(unclosed.closed, self)

    def _begin(self, *, progress: bool) -> None:
        """Meet the other workers."""
        config, events_fd, group = self._config, self._env.events_fd, self.ledger.group
        if events_fd is not None:
            send(events_fd, {"made": True})
        group.tell({"shards": config.shards, "timeout_s": config.timeout_s})
        points.reach("join")
        agree(self.ledger, config, self.worker)
        if progress and not config.quiet:
            self.meter.display = Display() if events_fd is None else Pipe(events_fd)
        if not config.quiet and self.worker == 0:
            unclosed.opened(self, self.voice.say)
        seed_all(config.seed)

    def finish(self, fingerprint: Callable[[], str]) -> None:
        """End the run: wait for all workers and what is on its way, show the fingerprint, release everything."""
        if self.operations.closed:
            return
        try:
            with self.operations.alike():
                if not self.engine.told_of_changes:  # else the script has caught the error, and ends
                    self.engine.check_untouched(self.engine.optimizers, values=True)
                self.operations.check_untouched = lambda: None
                self.engine.updates.finish()
                self.saving.conclude()
            log_last(self.engine, self.operations.perform)
            end(self.engine, self.operations, fingerprint, self.meter, self.digests, self._env)
            self.saving.close()
            self.ledger.group.tell({"closed": True})
        finally:
            self.release()

    def release(self) -> None:
        """Let go of everything, as after a failure; nobody is waited for."""
        self.operations.closed = True
        self._opened.close()
