"""A model of the step protocol, and a checker that goes through every order in which its actions can happen.

What is modelled: `Ledger.perform` on every worker (try, commit, abandon, recover, catch up), the rounds of `Group`,
the images of `State` in two halves each (so that a torn copy exists), the journal and the word `committed`. Who is in a
generation is decided by the supervisor's own code, `launch/roster.py`. A worker may be killed between any two actions,
so at any point of its program, as often as the size of the model allows; each time it is replaced as the roster says.

What is not: arithmetic, timeouts, backoff, a limit of restarts, scripts that fail by themselves, being asked to stop.
An exchange among some of the workers (gradients, layers that span shards) counts as part of the compute phase. A
worker that is stopped is one that takes long; the supervisor kills it in the end. What a worker tells the supervisor
is heard at once: a worker that has said something does nothing until it is answered, or is at its end.

What is promised, and where it is checked:

1. No committed version is lost: `Model.invariant` (it can be had back in every state), `_collected` (after recovery it
   is there), `commit` (the word only grows).
2. No operation is committed twice, or with an image that is not changed: `commit`.
3. Nobody writes outside the present generation, no place has two workers, and whoever computes reads version n only:
   `_check_writer`, `invariant`.
4. Nothing gets stuck or goes round for ever: `check`; and at the end all operations are done: `terminal`.
5. Everyone sees the same results, and the same state at the end: `_adopt`, `ends`.

Every rule that the protocol relies on is a field of `Rules`. Without it the checker finds what goes wrong, and shows
the shortest way there; that is how we know that the checker can fail, and that the rule is needed.

The content of version v of an image is v in both halves. A change adds 1 to what is there, one half after the other,
so a change of the wrong version, a second one, or half of one is seen as a number that should not be there.

    python protocol.py        # a table of sizes and states, then the shortest trace for every rule that is left out
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import checker
from checker import Event, Outcome, Violation

from evenstep.launch.roster import Announce, Decision, Lose, Regroup, Roster, Script, Start

__all__ = ["NEEDED", "SIZES", "Model", "Rules", "Size", "check"]

NEVER = -1
ROUNDS = ("recovered", "result", "update", "committed")  # of one operation; the first in a new generation only
WITHOUT_PROCESS = ("dead", "exited", "free")


@dataclass(frozen=True)
class Rules:
    """What the protocol relies on. Each can be left out, to see what it is good for.

    The last three are here because this model showed that the code did without them.
    """

    result_round: bool = True
    """Nobody changes an image before everyone has ended its backward."""
    backup_first: bool = True
    """`State.save` copies before it marks."""
    update_round: bool = True
    """The first worker commits when everyone has updated."""
    first_commits: bool = True
    """Only the first worker appends to the journal."""
    entry_first: bool = True
    """`Journal.append` writes the entry before it counts."""
    committed_round: bool = True
    """Nobody goes on before the operation is committed."""
    posts_stay: bool = True
    """What was posted is collected even when the group has been aborted meanwhile."""
    asked_by_all: bool = True
    """Whether to leave is decided from what all have read, not from what each has."""
    marks_compared: bool = True
    """A mark counts by its number. Without: it is cleared after the commit, and every mark that is left counts."""
    rollback_later: bool = True
    """The next generation rolls back. Without: every survivor does, as soon as its attempt has failed."""
    recovered_round: bool = True
    """Nobody begins before the first worker has rolled back."""
    takes_from_journal: bool = True
    """A worker whose operation is committed already does not do it again."""
    loss_aborts: bool = True
    """The loss of a member ends all waits, by the supervisor or whoever notices it."""
    all_wait: bool = True
    """A generation begins when all that live of the one before wait for it."""
    ended_first: bool = True
    """A place is free when its process has ended. Without: a stopped one is replaced, and may wake up again."""
    ended_before_scaled: bool = True
    """The same for one that was dismissed: it may not have read that yet when the user scales up again."""
    form_at_end: bool = True
    """When a worker ends well, the supervisor looks whether those who are left wait for a generation."""
    pulls_at_end: bool = True
    """A worker that comes to the end by the journal alone brings its private copies up to date before it closes."""


@dataclass(frozen=True)
class Size:
    """How much of the endless protocol to go through.

    Attributes:
        workers: How many begin.
        operations: How many the script does.
        deaths: How many are killed at most, newcomers among them.
        scales: The numbers of workers that the user asks for, one after the other, at any time.
        images: How many the state has; they are shared out among the members.
    """

    workers: int
    operations: int
    deaths: int
    scales: tuple[int, ...] = ()
    images: int = 2

    @property
    def places(self) -> int:
        """How many workers there may be at a time."""
        return max(self.workers, *self.scales, 1)


class Image(NamedTuple):
    """One entry of `State`: its live and its backup image by halves, and its mark."""

    live: tuple[int, int]
    backup: tuple[int, int]
    mark: int


class Worker(NamedTuple):
    """A place: the process in it, and what it has posted."""

    place: int
    at: str = "free"  # the next action of its program, or how it ended
    k: int = 0  # how far it is within that action
    n: int = 0  # `Ledger._next`
    left: bool = True  # `Group.left`
    recovered: bool = False  # `Ledger._recovered` is its generation
    present: bool = False  # its generation is the one that was announced last
    fresh: bool = False  # its private copies are those of its operation
    post: int = NEVER  # the round that it has posted last in this generation
    saw: bool = False  # whether that post says that the supervisor asks for a regroup
    mail: str = ""  # what the last announcement says to it: "in" or "out"

    @property
    def alive(self) -> bool:
        """Whether the supervisor has not reaped it yet."""
        return self.at != "free"


class State(NamedTuple):
    """Everything: the places, the segment, the supervisor, and what may still happen."""

    workers: tuple[Worker, ...]  # by place; after them, if a rule is left out, those that were replaced alive
    images: tuple[Image, ...]
    roster: Roster
    members: tuple[int, ...] = ()
    committed: int = 0
    journal: tuple[int, ...] = ()
    aborted: bool = False
    asked: bool = False  # Asks.REGROUP is above the present generation
    deaths: int = 0
    scaled: int = 0

    def put(self, i: int, **changes: Any) -> "State":
        """Another state of one worker."""
        return self._replace(workers=(*self.workers[:i], self.workers[i]._replace(**changes), *self.workers[i + 1 :]))

    def put_image(self, i: int, **changes: Any) -> "State":
        """Another state of one image."""
        return self._replace(images=(*self.images[:i], self.images[i]._replace(**changes), *self.images[i + 1 :]))


def half(pair: tuple[int, int], which: int, value: int) -> tuple[int, int]:
    """A pair with one half replaced."""
    return (value, pair[1]) if which == 0 else (pair[0], value)


class _Kept(Roster):
    """A roster of which there is one object for each value (see `Model._keep`): it is compared and found at once."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


class _Hasty(_Kept):
    """Without `all_wait`."""

    def _all_wait(self) -> bool:
        return True


class _Crowded(_Kept):
    """Without `ended_before_scaled`."""

    def _is_free(self, place: int) -> bool:
        return place not in [worker.place for worker in self.staying]


class _Silent(Roster):
    """Without `form_at_end`."""

    def form(self) -> "tuple[Roster, list[Decision]]":
        return self, []


def _without_counts(roster: Roster) -> Roster:
    """What makes no difference here, so that fewer states differ: how often what happened, and exit codes."""
    workers = tuple(worker._replace(code=None) for worker in roster.workers)
    return roster._replace(workers=workers, generation=0, restarts=0, failures=(), failed_at=None)


class Model:
    """The actions. Each worker has one program, so in any state it has at most one next action."""

    def __init__(self, size: Size, rules: Rules | None = None) -> None:
        self.size, self.rules = size, rules or Rules()
        self._kind = _Kept if self.rules.all_wait else _Hasty
        self._kind = self._kind if self.rules.ended_before_scaled else _Crowded
        self._kept: dict[tuple[Any, ...], Roster] = {}
        self._turns: dict[tuple[Any, ...], tuple[Roster, list[Decision]]] = {}
        self._program: dict[str, Callable[[State, int], State]] = {
            "obtain": self.obtain,
            "enter": self.enter,
            "rollback": self.rollback,
            "compute": self.compute,
            "save": self.save,
            "change": self.change,
            "append": self.append,
            "commit": self.commit,
            "abandon": self.abandon,
            "close": self.close,
            **{f"post {name}": self.post for name in ROUNDS},
            **{f"await {name}": self.collect for name in ROUNDS},
        }

    def initial(self) -> State:
        """`Supervisor.run`: all workers are started, and count as members before there is a generation."""
        size = self.size
        workers = [Worker(p, "obtain" if p < size.workers else "free") for p in range(size.places)]
        roster = self._kind(size.workers)
        for p in range(size.workers):
            roster = roster.started(p)
        roster = self._keep(roster)
        images = (Image((0, 0), (NEVER, NEVER), 0),) * size.images
        return State(tuple(workers), images, roster, deaths=size.deaths)

    def moves(self, s: State) -> Iterator[tuple[Event, State | Violation]]:
        """What can happen next, and what it leads to."""
        for i, w in enumerate(s.workers):
            if w.at in self._program:
                yield self.step(s, i)
                if s.deaths and i < self.size.places:
                    yield ("killed", i), self.die(s, i)
                    if not self.rules.ended_first and w.present:
                        yield ("stopped", i), self.replace_stopped(s, i)
            elif w.alive:
                yield ("reaped", i), self.reap(s, i)
        for p in s.roster.starts:
            yield ("started", p), self.start(s, p)
        if s.scaled < len(self.size.scales) and (s.roster.starts or any(w.alive for w in s.workers)):
            yield ("scaled", self.size.scales[s.scaled]), self.scale(s)

    def step(self, s: State, i: int) -> tuple[Event, State | Violation]:
        """The next action of a worker; it leads nowhere else if it has to wait."""
        try:
            return ("step", i), self._program[s.workers[i].at](s, i)
        except Violation as violation:
            return ("step", i), violation

    def unseen(self, s: State) -> int | None:
        """A worker whose next action nobody can see or hinder, if there is one: no other order need be tried.

        It reads only what cannot change before it is done, writes only what is the worker's own, and leaves the same
        behind whether the worker is killed before or after it. That is not so when a rule is left out.
        """
        for i, w in enumerate(s.workers):
            if (
                (w.at.startswith("await") and not self._missing(s, w))
                or (w.at == "obtain" and not w.left and w.n == s.committed < self.size.operations)
                or (w.at == "enter" and w.mail == "in")
                or w.at == "abandon"
            ):
                return i
        return None

    def describe(self, s: State, event: Event) -> str:
        """An event in words."""
        what, i = event
        if what == "scaled":
            return f"the user scales to {i}"
        w = s.workers[i]
        if what != "step":
            return f"worker {w.place} is {what}" + (f" at '{w.at}'" if what in ("killed", "stopped") else "")
        ghost = "the former " if i >= self.size.places else ""
        rank = f" (rank {s.members.index(w.place)})" if w.present and w.place in s.members else ""
        part = f" {w.k}" if w.at in ("rollback", "save", "change") else ""
        return f"{ghost}worker {w.place}{rank}, operation {w.n}: {w.at}{part}"

    # ---- a worker: going on, doing again, catching up ----

    def obtain(self, s: State, i: int) -> State:
        """`Ledger._obtain`: take what is in the journal; else enter the next generation; else try."""
        w = s.workers[i]
        if w.n == self.size.operations:
            return self.ends(s, i)
        if w.n < s.committed and self.rules.takes_from_journal:
            for n in range(w.n, s.committed):
                self._adopt(s, n)
            return s.put(i, n=s.committed, fresh=False)
        if w.left:  # Group.enter says "waits"
            return self._turn(s.put(i, at="enter"), "waits", w.place)
        if w.recovered:
            return s.put(i, at="compute")
        return s.put(i, at="rollback" if self._rank(s, w) == 0 else "post recovered")

    @staticmethod
    def _adopt(s: State, n: int) -> None:
        """`adopt` of an operation: what the script gets to see must be the same for everyone, always."""
        if n >= len(s.journal) or s.journal[n] != n + 1:
            raise Violation(f"operation {n} gave {s.journal[n : n + 1]} to one worker, but {n + 1} is what it gives")

    def enter(self, s: State, i: int) -> State:
        """`Group.enter`, the rest of it: `_take` the generation that names this worker, or end as dismissed."""
        w = s.workers[i]
        if w.mail == "in":
            return s.put(i, at="obtain", left=False, recovered=False, present=True, mail="")
        return self._ended(s, i, "exited") if w.mail == "out" else s

    def rollback(self, s: State, i: int) -> State:
        """`State.rollback` by the first worker in `Engine.recover`: image by image, half by half."""
        self._check_writer(s, i)
        w = s.workers[i]
        for k in range(w.k, 2 * len(s.images)):
            image = s.images[k // 2]
            if self._to_roll_back(image, w):
                live = half(image.live, k % 2, image.backup[k % 2])
                return s.put_image(k // 2, live=live).put(i, k=k + 1)
        return s.put(i, at="post recovered", k=0)

    def _to_roll_back(self, image: Image, w: Worker) -> bool:
        return image.mark == w.n + 1 if self.rules.marks_compared else image.mark != 0

    def compute(self, s: State, i: int) -> State:
        """`Compute.run`: reads all images for as long as it takes (see `invariant`), then the result round begins."""
        if not self.rules.result_round:
            # what another worker still reads may change from now on
            return self._to_update(s.put(i, post=self._seq(s.workers[i].n, "result")), i)
        return self._posted(s, i, "result")

    def post(self, s: State, i: int) -> State:
        """`core.post`: from now on everyone can collect it, even if this worker dies."""
        return self._posted(s, i, s.workers[i].at.removeprefix("post "))

    def _posted(self, s: State, i: int, name: str) -> State:
        self._check_writer(s, i)
        w = s.workers[i]
        return s.put(i, at=f"await {name}", post=self._seq(w.n, name), saw=s.asked and name == "committed")

    @staticmethod
    def _seq(n: int, name: str) -> int:
        return len(ROUNDS) * n + ROUNDS.index(name)

    def collect(self, s: State, i: int) -> State:
        """`Group._collect`: go on when all have posted; fail if that can not be hoped for any more.

        A post that was made is collected even when the group is aborted. The posts stay, so it makes no difference
        whether they are collected one by one or, as here, all at once.
        """
        w = s.workers[i]
        missing = self._missing(s, w)
        if not missing and not (s.aborted and not self.rules.posts_stay):
            return self._collected(s, i, w.at.removeprefix("await "))
        if s.aborted:
            return self._failed(s, i)
        if self.rules.loss_aborts and any(s.workers[p].at in WITHOUT_PROCESS for p in missing):
            return self._failed(s._replace(aborted=True), i)  # Group._check_alive, _is_gone
        return s

    def _missing(self, s: State, w: Worker) -> list[int]:
        """Who has not posted what a worker waits for."""
        if w.place not in s.members:  # it waits for those who are not its fellows any more
            return [w.place]
        name = w.at.removeprefix("await ")
        seq = self._seq(w.n, name)
        return [p for p in s.members if s.workers[p].post < seq] if getattr(self.rules, f"{name}_round") else []

    def _collected(self, s: State, i: int, name: str) -> State:
        w = s.workers[i]
        if name == "recovered":
            if any(image.live != (s.committed, s.committed) for image in s.images):
                raise Violation(f"recovered, but the images are {[x.live for x in s.images]}, not {s.committed}")
            return s.put(i, at="compute", recovered=True, fresh=True)
        if name == "result":
            return self._to_update(s, i)
        if name == "update":
            commits = self._rank(s, w) == 0 or not self.rules.first_commits
            first = "append" if self.rules.entry_first else "commit"
            return s.put(i, at=first if commits else "post committed")
        saw = any(s.workers[p].saw for p in s.members) if self.rules.asked_by_all else w.saw
        if self.rules.committed_round:
            self._adopt(s, w.n)
        if not self.rules.marks_compared:
            for number in self._owned(s, w):
                s = s.put_image(number, mark=0)
        return s.put(i, at="obtain", n=w.n + 1, left=saw, fresh=True)

    def _failed(self, s: State, i: int) -> State:
        """`Ledger._try`, its except: too late to matter if the operation is committed, else abandon it."""
        w = s.workers[i]
        if w.n < s.committed and w.at == "await committed":
            self._adopt(s, w.n)
            return s.put(i, at="obtain", n=w.n + 1, left=True, fresh=True)
        return s.put(i, at="abandon", k=0)

    def abandon(self, s: State, i: int) -> State:
        """`Engine.abandon` and `Group.leave`: forget what is private, and touch nothing that is shared."""
        w = s.workers[i]
        if not self.rules.rollback_later:
            for number, image in enumerate(s.images):
                if self._to_roll_back(image, w):
                    s = s.put_image(number, live=image.backup)
        return s.put(i, at="obtain", left=True, recovered=False)

    # ---- a worker: the update and the commit ----

    def _to_update(self, s: State, i: int) -> State:
        return s.put(i, at="save" if self._owned(s, s.workers[i]) else "post update", k=0)

    def save(self, s: State, i: int) -> State:
        """`State.save` for each owned image: two halves of the backup, then the mark."""
        self._check_writer(s, i)
        w = s.workers[i]
        owned = self._owned(s, w)
        number, part = owned[w.k // 3], w.k % 3
        image = s.images[number]
        step = part if self.rules.backup_first else (part - 1) % 3  # 0, 1: a half of the copy; 2: the mark
        if step == 2:
            s = s.put_image(number, mark=w.n + 1)
        else:
            s = s.put_image(number, backup=half(image.backup, step, image.live[step]))
        return s.put(i, k=w.k + 1) if w.k + 1 < 3 * len(owned) else s.put(i, at="change", k=0)

    def change(self, s: State, i: int) -> State:
        """`PreparedOptimizer.update`, `optimizer.step`: the owned images change, half by half."""
        self._check_writer(s, i)
        w = s.workers[i]
        owned = self._owned(s, w)
        number, part = owned[w.k // 2], w.k % 2
        live = s.images[number].live
        s = s.put_image(number, live=half(live, part, live[part] + 1))
        return s.put(i, k=w.k + 1) if w.k + 1 < 2 * len(owned) else s.put(i, at="post update", k=0)

    def append(self, s: State, i: int) -> State:
        """`Journal.append`, its first half: write the entry behind those that count."""
        self._check_writer(s, i)
        entry = s.images[0].live[0]  # what the operation gave is a function of what it did
        after = "commit" if self.rules.entry_first else "post committed"
        place = s.committed if self.rules.entry_first else s.committed - 1
        return s._replace(journal=(*s.journal[:place], entry)).put(i, at=after)

    def commit(self, s: State, i: int) -> State:
        """`Journal.append`, its second half: the word `committed`. From now on the operation is done."""
        self._check_writer(s, i)
        n = s.workers[i].n
        if s.committed != n:
            raise Violation(f"operation {n} is committed when {s.committed} are: once more")
        if any(image.live != (n + 1, n + 1) for image in s.images):
            raise Violation(f"operation {n} is committed with images {[image.live for image in s.images]}")
        after = "post committed" if self.rules.entry_first else "append"
        return s._replace(committed=s.committed + 1).put(i, at=after)

    def ends(self, s: State, i: int) -> State:
        """`Run.close`: the script is at its end; the worker says "closed", and its process ends when it likes."""
        if not (s.workers[i].fresh or self.rules.pulls_at_end):
            raise Violation(f"worker {i} closes with private copies that are not those of the last operation")
        if any(image.live != (s.committed, s.committed) for image in s.images):
            raise Violation(f"worker {i} closes with images {[image.live for image in s.images]}")
        return s.put(i, at="close")._replace(roster=self._keep(s.roster.speaks(s.workers[i].place, Script.CLOSED)))

    def close(self, s: State, i: int) -> State:
        """The process ends with exit code 0."""
        return self._ended(s, i, "exited")

    # ---- being killed ----

    def die(self, s: State, i: int) -> State:
        """Kill -9. What it had posted can still be collected; the supervisor learns of it later."""
        return self._ended(s, i, "dead")._replace(deaths=s.deaths - 1)

    @staticmethod
    def _ended(s: State, i: int, how: str) -> State:
        w = s.workers[i]
        ended = Worker(w.place, how, post=w.post, saw=w.saw)
        return s._replace(workers=(*s.workers[:i], ended, *s.workers[i + 1 :]))

    def replace_stopped(self, s: State, i: int) -> State:
        """Not in the code: a stopped worker is killed, and nobody goes on before its end."""
        ghost = s.workers[i]
        s = s._replace(workers=(*s.workers, ghost), deaths=s.deaths - 1)
        return self._reaped(s, i, -9)

    # ---- the supervisor ----

    def reap(self, s: State, i: int) -> State:
        """A process has ended, and the supervisor sees it."""
        if i >= self.size.places:
            return s._replace(workers=(*s.workers[:i], *s.workers[i + 1 :]))
        return self._reaped(s, i, 0 if s.workers[i].at == "exited" else -9)

    def _reaped(self, s: State, i: int, code: int) -> State:
        w = s.workers[i]
        s = s._replace(workers=(*s.workers[:i], Worker(w.place, post=w.post, saw=w.saw), *s.workers[i + 1 :]))
        if code == 0 and not self.rules.form_at_end:
            roster, _ = _Silent(*s.roster).ended(w.place, code, s.committed)
            return s._replace(roster=self._keep(self._kind(*roster)))
        return self._turn(s, "ended", w.place, code, s.committed)

    def start(self, s: State, p: int) -> State:
        """A newcomer in a free place; it begins with the first operation."""
        before = s.workers[p]
        begun = Worker(p, "obtain", post=before.post, saw=before.saw)
        ghosts = (before,) if before.alive else ()  # only without `ended_before_scaled`
        workers = (*s.workers[:p], begun, *s.workers[p + 1 :], *ghosts)
        return s._replace(workers=workers, roster=self._keep(s.roster.started(p)))

    def scale(self, s: State) -> State:
        """The user wants more or fewer workers."""
        number = self.size.scales[s.scaled]
        return self._turn(s._replace(scaled=s.scaled + 1), "scale", number, self.size.places)

    def _keep(self, roster: Roster) -> Roster:
        """The one object for a roster, without what makes no difference."""
        plain = _without_counts(roster)
        return self._kept.setdefault(tuple(plain), plain)

    def _turn(self, s: State, event: str, *args: int) -> State:
        """`RunCrew._carry_out`: do what the roster decides on an event. Being a value, it is asked once."""
        asked = (s.roster, event, *args)
        turn = self._turns.get(asked)
        if turn is None:
            roster, decisions = getattr(s.roster, event)(*args)
            turn = self._turns[asked] = (self._keep(roster), decisions)
        roster, decisions = turn
        s = s._replace(roster=roster)
        for decision in decisions:
            if isinstance(decision, Lose):
                s = s._replace(aborted=s.aborted or (decision.was_member and self.rules.loss_aborts))
            elif isinstance(decision, Regroup):
                s = s._replace(asked=True)
            elif isinstance(decision, Announce):
                s = self._announce(s, decision.members, decision.leaving)
            elif not isinstance(decision, Start):
                raise Violation(f"no script is at fault here, but the supervisor decides on {decision}")
        return s

    def _announce(self, s: State, members: tuple[int, ...], leaving: tuple[int, ...]) -> State:
        """`generations.announce`: clear the abort, then name the members. All rounds from now on are later ones."""
        workers = [w._replace(post=NEVER, saw=False, present=False) for w in s.workers]
        for i, w in enumerate(workers):
            # one that died while it waited is reaped later; a former worker reads what is said to its place
            if w.at == "enter":
                workers[i] = w._replace(mail="in" if w.place in members else "out" if w.place in leaving else w.mail)
        return s._replace(workers=tuple(workers), members=members, aborted=False, asked=False)

    # ---- what must hold ----

    def invariant(self, s: State) -> None:
        """What holds in every state. Actions check for themselves what must hold when they happen.

        Raises:
            Violation: It does not hold.
        """
        whole = (s.committed, s.committed)
        for number, image in enumerate(s.images):
            if image.live != whole and (image.mark != s.committed + 1 or image.backup != whole):
                raise Violation(f"version {s.committed} of image {number} cannot be had back: {image}")
        present = [w.place for w in s.workers if w.present and w.at not in WITHOUT_PROCESS]
        if len(set(present)) < len(present):
            raise Violation(f"two processes take one place in the present generation: {sorted(present)}")
        for w in s.workers:
            if w.at == "compute" and (w.n != s.committed or any(image.live != whole for image in s.images)):
                raise Violation(
                    f"worker {w.place} computes operation {w.n} from {[image.live for image in s.images]} "
                    f"when {s.committed} are committed"
                )

    def terminal(self, s: State) -> bool:
        """Whether the run is over: no process, and none that will be started.

        Raises:
            Violation: It is over, but not all operations are done.
        """
        if s.roster.starts or any(w.alive for w in s.workers):
            return False
        if s.committed != self.size.operations:
            raise Violation(f"the run is over after {s.committed} of {self.size.operations} operations")
        return True

    def _check_writer(self, s: State, i: int) -> None:
        if not s.workers[i].present:
            raise Violation(f"worker {s.workers[i].place} writes outside the present generation")

    @staticmethod
    def _rank(s: State, w: Worker) -> int:
        return s.members.index(w.place) if w.place in s.members else 0

    def _owned(self, s: State, w: Worker) -> list[int]:
        """Which images a worker changes: shared out among the members of the generation (`Gradients.owners`)."""
        return [number for number in range(len(s.images)) if number % len(s.members) == self._rank(s, w)]

    def brief(self, s: State) -> str:
        """Where everyone is."""
        places = ", ".join(f"worker {w.place} at '{w.at}' of operation {w.n}" for w in s.workers)
        return f"{places}; {s.committed} committed"


def check(size: Size, rules: Rules | None = None, *, all_orders: bool = False) -> Outcome:
    """Go through all states of a size; see `checker.check`. Without a rule, all orders are tried."""
    return checker.check(Model(size, rules), all_orders=all_orders or rules is not None)


SIZES = (
    Size(1, 3, 3),
    Size(2, 3, 2),
    Size(2, 2, 3),
    Size(3, 2, 1),
    Size(3, 1, 2),
    Size(1, 2, 2, scales=(2,)),
    Size(2, 2, 1, scales=(1,)),
    Size(2, 2, 1, scales=(1, 2)),
    Size(3, 2, 1, scales=(2,)),
)
"""What the tests go through."""

NEEDED = {
    "result_round": Size(2, 1, 0),
    "backup_first": Size(2, 1, 1),
    "update_round": Size(2, 1, 0),
    "first_commits": Size(2, 1, 0),
    "entry_first": Size(2, 1, 1),
    "committed_round": Size(2, 2, 0),
    "asked_by_all": Size(3, 2, 1),
    "marks_compared": Size(2, 2, 1),
    "rollback_later": Size(3, 1, 1),
    "recovered_round": Size(2, 1, 1),
    "takes_from_journal": Size(2, 2, 1),
    "loss_aborts": Size(2, 1, 1),
    "all_wait": Size(3, 1, 1),
    "ended_first": Size(2, 1, 1),
    "ended_before_scaled": Size(2, 2, 0, scales=(1, 2)),
    "form_at_end": Size(3, 1, 1),
    "pulls_at_end": Size(2, 1, 1),
}
"""The rules that the protocol needs, each with a size at which that shows."""


def main() -> None:
    """Print the table, then what each rule is good for."""
    print("workers  operations  deaths  scaled to   states  terminal  seconds")
    for size in SIZES:
        outcome = check(size)
        scales = ",".join(map(str, size.scales)) or "-"
        print(
            f"{size.workers:7}  {size.operations:10}  {size.deaths:6}  {scales:>9}  {outcome.states:7}  "
            f"{outcome.terminals:8}  {outcome.seconds:7.1f}" + (f"\n{outcome}" if outcome.violation else "")
        )
    for name, size in NEEDED.items():
        outcome = check(size, Rules(**{name: False}))
        print(f"\nwithout {name} ({outcome.states} states):\n{outcome}")


if __name__ == "__main__":
    main()
