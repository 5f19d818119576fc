"""Steps that are computed twice before they commit, so that a machine that computes wrong is found and named.

A step that is due is computed again with every shard on another worker, and commits only if both agree. If they differ
it is computed three more times, and `plan/verdict.py` says who was wrong. The step has changed nothing yet, so it is
simply done again: by the others, if a supervisor dismisses the worker that was wrong, or by the same workers, as often
as that is tolerated.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.utils import _pytree as pytree

from evenstep.core.errors import NondeterminismError, PeerError, WrongError
from evenstep.core.output import say
from evenstep.engine.compute import Compute, Samples, Work
from evenstep.engine.custody import Custody
from evenstep.engine.elements import Element, first_difference
from evenstep.engine.holdings import Holdings
from evenstep.engine.on_device import DeviceCompute
from evenstep.engine.place import place_of
from evenstep.engine.randomness import derive
from evenstep.engine.reports import Report
from evenstep.engine.results import ShardResult
from evenstep.engine.sharing import Sharing
from evenstep.engine.twins import twin_of
from evenstep.engine.witness import Witness
from evenstep.plan.verdict import NUM_PASSES, Account, Difference, Pass, Verdict, judge, turn_of

__all__ = ["Recheck", "Trial"]

_MOST_CHANGES = 3  # of the state, while one step is computed again and again


@dataclass(frozen=True)
class Trial:
    """A step to be computed more than once.

    Attributes:
        work: What this worker has to do.
        samples: The global batch.
        keeps: For every worker, the shard whose buffers it keeps.
        compute: Computes it for good.
    """

    work: Work
    samples: Samples
    keeps: Sequence[int | None]
    compute: Callable[[Work], Report]


class Recheck:
    """Computes steps more than once. All workers must call everything here alike.

    Args:
        holdings: What the workers hold together.
        sharing: Which shards each worker has.
        compute: Computes shards.
    """

    def __init__(self, holdings: Holdings, sharing: Sharing, compute: Compute | DeviceCompute) -> None:
        self._holdings, self._sharing, self._compute = holdings, sharing, compute
        self._group, self._config = holdings.group, holdings.config
        self._custody = Custody(holdings)
        self._forgiven: dict[int, int] = {}  # how often each worker was wrong so far
        self._said_alone = False

    def is_due(self, version: int) -> bool:
        """Whether a step is computed twice: one in every `recheck` steps, chosen by the seed."""
        every = self._config.recheck
        if not every:
            return False
        return version % every == derive("recheck", self._config.seed, version // every) % every

    def committed(self, version: int) -> None:
        """Note that a step is committed, with `version` steps in all. Does not communicate."""
        if self.is_due(version):
            self._custody.note()

    def compute(self, trial: Trial) -> Report:
        """Compute a step until two computations of all shards agree; the last of them counts.

        Also checks, before and afterwards, that the state is what the last step left, and the same on all sites.

        Raises:
            NondeterminismError: The step function gives different bits on every worker.
            WrongError: A worker computes wrong, and it is not known which, or no other is left.
            PeerError: A worker computes wrong; the supervisor says who goes on.
        """
        self._say_alone()
        changed = 0
        while True:
            self._look(trial)
            first = self._try(trial, 0)
            expected = self._digests(trial, first, 0)
            witness, work = self._watched(trial.work)
            report = trial.compute(work)
            second = self._note(witness, report.results)
            agree = self._digests(trial, second, 1) == expected
            if not self._look(trial):
                changed += 1
                if changed == _MOST_CHANGES:
                    raise WrongError(
                        f"in step {trial.work.version} the state has changed by itself {changed} times while it was "
                        "computed: nothing of it was committed; train without the machine that was named"
                    )
            elif agree:
                return report
            else:
                self._act(self._find_out(trial, [first, second]))
            self._clear()

    def _say_alone(self) -> None:
        """Say, once, what the only worker cannot find."""
        if self._group.num_workers > 1 or self._said_alone or self._config.quiet:
            return
        self._said_alone = True
        self._group.say(
            "recheck: the only worker computes steps twice by itself, which finds code that is not deterministic and a "
            "machine that is wrong now and then, but not one that is always wrong in the same way; use several workers "
            "for that"
        )

    def _look(self, trial: Trial) -> bool:
        """Check that the state is unchanged: computations from different values would differ rightly."""
        return self._custody.check(trial.work.where)

    def _try(self, trial: Trial, number: int, wanted: Collection[tuple[int, str]] = ()) -> Witness:
        """Compute all shards in a pass that does not count."""
        spans, turn = self._sharing.spans, turn_of(number, self._group.num_workers)
        turned = [*spans[turn:], *spans[:turn]]
        parts = {k: trial.samples.part(k) for k in range(*turned[self._group.rank]) if trial.work.sizes[k]}
        keeps = [*trial.keeps[turn:], *trial.keeps[:turn]][self._group.rank]
        witness, work = self._watched(replace(trial.work, parts=parts, keeps=keeps, counts=False), wanted)
        self._compute.context.spans = turned
        try:
            results = self._compute.run(work)() if parts else {}
        finally:
            self._compute.context.spans = spans
        self._note(witness, results)
        self._clear()
        return witness

    def _watched(self, work: Work, wanted: Collection[tuple[int, str]] = ()) -> tuple[Witness, Work]:
        """A witness, and work that it records; on samples of its own, which it may change."""
        witness = Witness(list(work.parts), wanted)
        parts = {k: pytree.tree_map_only(Tensor, twin_of, part) for k, part in work.parts.items()}
        for shard, part in parts.items():
            witness.samples(shard, part)
        return witness, replace(work, parts=parts, witness=witness)

    def _note(self, witness: Witness, results: Mapping[int, ShardResult]) -> Witness:
        witness.results(results)
        for shard, name, tensor in self._holdings.carries.set_here():
            witness.carried(shard, name, tensor)
        return witness

    def _clear(self) -> None:
        """Forget what a computation that is not to be committed has left."""
        self._holdings.models.drop_buffers()
        self._holdings.carries.begin()

    def _digests(self, trial: Trial, witness: Witness, number: int) -> dict[str, int]:
        """One number for every shard. Returns when everyone has ended the pass."""
        mine = {str(shard): digest for shard, digest in witness.digests().items()}
        of_all = self._group.gather_json(f"{trial.work.where}digests of pass {number}", mine)
        return {shard: digest for theirs in of_all for shard, digest in theirs.items()}

    # ---- when they differ ----

    def _find_out(self, trial: Trial, witnesses: list[Witness]) -> "_Finding":
        """Compute the step three more times, and find out who was wrong."""
        passes = [self._accounts(trial, witness, number) for number, witness in enumerate(witnesses)]
        wanted = {(d.shard, d.item) for d in judge(passes).differences}
        for number in range(len(witnesses), NUM_PASSES):
            witnesses.append(self._try(trial, number, wanted))
            passes.append(self._accounts(trial, witnesses[number], number))
        verdict = judge(passes)
        found = next((d for d in verdict.differences if d.worker in verdict.wrong), verdict.differences[0])
        copies = (witnesses[n].copy(found.shard, found.item) for n in (found.number, found.other))
        one, other = (
            copy if passes[n][found.shard].worker == self._group.worker else None
            for n, copy in zip((found.number, found.other), copies, strict=True)
        )
        element = first_difference(self._group, trial.work.where + "difference", one, other)
        places = dict(
            self._group.gather_json(
                trial.work.where + "places", [self._group.worker, place_of(self._holdings.memory.device)]
            )
        )
        return _Finding(trial.work.version, verdict, found, passes[found.other][found.shard].worker, element, places)

    def _accounts(self, trial: Trial, witness: Witness, number: int) -> Pass:
        """Who computed what in a pass, and the results."""
        tag = f"{trial.work.where}trails of pass {number}"
        found: dict[int, Account] = {}
        of_all = self._group.gather_json(tag, [[shard, trail] for shard, trail in witness.trails().items()])
        for worker, theirs in zip(self._group.members, of_all, strict=True):
            for shard, trail in theirs:
                stages = tuple(tuple((name, digest) for name, digest in stage) for stage in trail)
                found[shard] = Account(worker, stages)
        return found

    def _act(self, finding: "_Finding") -> None:
        """Respond to a difference; return only if the step is to be computed again by the same workers.

        Raises:
            NondeterminismError, WrongError, PeerError: See `compute`.
        """
        group, wrong = self._group, finding.verdict.wrong
        if finding.verdict.unsteady:
            raise NondeterminismError(finding.unsteady())
        if not wrong:
            raise WrongError(finding.undecided())
        right = [worker for worker in group.members if worker not in wrong]
        if group.elastic and right:
            if group.worker == right[0]:
                self._accuse(finding)
            raise PeerError(finding.accuses(wrong[0]), wrong[0])
        self._tolerate(finding)

    def _accuse(self, finding: "_Finding") -> None:
        """Tell the supervisor, which dismisses or tolerates those that were wrong."""
        for worker in finding.verdict.wrong:
            text, most = finding.accuses(worker), self._config.tolerate_wrong
            self._group.tell({"wrong": worker, "text": text, "tolerates": most})

    def _tolerate(self, finding: "_Finding") -> None:
        """Without a supervisor: tolerate those that were wrong, as often as is allowed.

        Raises:
            WrongError: One was wrong more often.
        """
        for worker in finding.verdict.wrong:
            self._forgiven[worker] = self._forgiven.get(worker, 0) + 1
            text = finding.accuses(worker)
            if self._forgiven[worker] > self._config.tolerate_wrong:
                raise WrongError(
                    f"{text}. Nothing of the step was committed; train without that machine, or go on at your own risk "
                    "with --tolerate-wrong N, which does such a step again"
                )
            if self._group.rank == 0:
                say(f"{text}; tolerated, {self._forgiven[worker]} of {self._config.tolerate_wrong}: it is done again")


@dataclass(frozen=True)
class _Finding:
    """What is known of a difference.

    Attributes:
        version: The version that the step reads.
        verdict: Who was wrong, if that can be told.
        shown: The difference to show.
        against: The worker that computed it differently.
        element: The first element that differs, if copies were kept.
        places: Where every worker computes.
    """

    version: int
    verdict: Verdict
    shown: Difference
    against: int
    element: Element | None
    places: dict[int, str]

    def _where(self) -> str:
        element = f": {self.element}" if self.element is not None else " (no copy was kept of it: it is too large)"
        return f"step {self.version}, shard {self.shown.shard}, {self.shown.item}{element}"

    def accuses(self, worker: int) -> str:
        """The sentence that says that a worker was wrong."""
        if worker == self.shown.worker:
            return f"worker {worker} ({self.places[worker]}) computed wrong in {self._where()}"
        found = next(d for d in self.verdict.differences if d.worker == worker)
        place = f"step {self.version}, shard {found.shard}, {found.item}"
        return f"worker {worker} ({self.places[worker]}) computed wrong in {place}"

    def undecided(self) -> str:
        """The sentence for when it is not known who was wrong."""
        one, other = self.shown.worker, self.against
        return (
            f"worker {one} ({self.places[one]}) and worker {other} ({self.places[other]}) do not agree on "
            f"{self._where()}. Each stays with what it has, so one of them computes wrong, and without a majority "
            "nobody can say which: nothing of the step was committed; train with three workers or more, or without one "
            "of these"
        )

    def unsteady(self) -> str:
        """The sentence that blames the code."""
        return (
            f"the step function is not deterministic: computed again, by the same worker and by others, it gives other "
            f"bits. First seen in {self._where()}. Look for a generator of its own, the clock, the order of a set, or "
            "state that it keeps between calls; what it draws must come from torch, numpy.random or random"
        )
