"""A model of a run over several machines: each has the whole state and steps for itself; any but the head may be lost.

It begins where `protocol.py` ends. That one goes through the workers of one machine; here a machine is one worker with
a memory of its own (state, journal, the word `committed`), and what is new is between them:

- what a machine posts arrives at each other machine late, and if it is lost perhaps at some and at others never;
- a machine counts an operation by itself when all have updated, and begins the next one, so one may have counted what
  another has not;
- a machine may be killed, with all its memory, or be cut off, and then goes on by itself as far as it can;
- the head (which is not lost here: then everyone ends) notices that later, says so, and that too arrives late;
- a machine that is started later is given the journal, and the state when it is let in.

What is promised: whoever computes operation n does so from version n, alike on all members; every operation that a
survivor has counted is counted by all and never done again there; what the script sees is always the same; and nothing
gets stuck. Every rule is a field of `Rules`, and without it the checker finds what goes wrong.

    python machines.py        # a table of sizes and states, then the shortest trace for every rule that is left out
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import checker
from checker import Event, Outcome, Violation

from evenstep.launch.roster import Announce, Decision, Lose, Regroup, Roster, Script, Start

__all__ = ["NEEDED", "SIZES", "Model", "Rules", "Size", "check"]

NEVER = -1
ROUNDS = ("recovered", "result", "update")  # of one operation; the first in a new generation only
GONE = ("dead", "exited", "free")


@dataclass(frozen=True)
class Rules:
    """What the protocol relies on beside that of one machine."""

    update_round: bool = True
    """A machine counts an operation when all machines have updated."""
    rolls_forward: bool = True
    """A machine that has not counted what another has takes that over. Without: it does the operation again."""
    rolls_back: bool = True
    """An operation that nobody has counted is undone before it is done again."""
    recovered_round: bool = True
    """Nobody begins before all have undone what nobody has counted."""
    gives_settled: bool = True
    """A newcomer is given only what all have counted. Without: perhaps what one had counted that is lost by then."""
    taken_first: bool = True
    """A newcomer takes part in an operation when it has the state. Without: the others change it meanwhile."""
    generation_checked: bool = True
    """What arrives from an earlier generation is dropped."""
    loss_aborts: bool = True
    """That a machine is lost is told to all others."""
    all_wait: bool = True
    """A generation begins when all that are left of the one before wait for it."""
    lost_for_good: bool = True
    """A machine that was cut off comes back without its state. Without: with what it made of it meanwhile."""
    over_for_all: bool = True
    """When all that have the state have come to the end, a newcomer goes too: nobody could give it anything."""


@dataclass(frozen=True)
class Size:
    """How much to go through.

    Attributes:
        machines: How many begin; the first is the head.
        operations: How many the script does.
        losses: How many are killed at most.
        cuts: How many are cut off at most.
    """

    machines: int
    operations: int
    losses: int = 0
    cuts: int = 0


class Machine(NamedTuple):
    """A machine: its worker, its memory, and what has arrived."""

    place: int
    at: str = "free"
    k: int = 0
    n: int = 0  # the operation of its worker
    live: tuple[int, int] = (NEVER, NEVER)
    backup: tuple[int, int] = (NEVER, NEVER)
    mark: int = 0
    committed: int = 0
    left: bool = True  # it has to enter the next generation first
    shared: bool = False  # it knows what everyone has counted
    recovered: bool = False
    present: bool = False
    post: int = NEVER  # what it posted last in this generation
    have: int = 0  # what it had counted when the generation began; NEVER: it has no state
    seen: tuple[int | None, ...] = ()  # what has arrived from each that is lost; None: what it posts comes
    late: tuple[int, ...] = ()  # what has arrived from each of an earlier generation
    aborted: bool = False
    told: bool = False  # that a machine is lost is on its way
    saw: bool = False  # it had heard, when it posted that it has updated, that others want to join
    leaves: bool = False  # somebody had, so that all wait for the next generation
    mail: str = ""
    cut: bool = False


class State(NamedTuple):
    """Everything."""

    machines: tuple[Machine, ...]
    roster: Roster
    members: tuple[int, ...] = ()
    asked: bool = False  # others want to join
    stale: tuple[tuple[int, int, int], ...] = ()  # (from, to, round): on its way since an earlier generation
    ghosts: tuple[tuple[int, int], ...] = ()  # (place, version) that machines which were cut off came to have
    losses: int = 0
    cuts: int = 0

    def put(self, i: int, **changes: Any) -> "State":
        """Another state of one machine."""
        changed = self.machines[i]._replace(**changes)
        return self._replace(machines=(*self.machines[:i], changed, *self.machines[i + 1 :]))


def half(pair: tuple[int, int], which: int, value: int) -> tuple[int, int]:
    """A pair with one half replaced."""
    return (value, pair[1]) if which == 0 else (pair[0], value)


class _Hasty(Roster):
    """Without `all_wait`."""

    def _all_wait(self) -> bool:
        return True


class Model:
    """The actions. Each machine has one program, so in any state it has at most one next action."""

    def __init__(self, size: Size, rules: Rules | None = None) -> None:
        self.size, self.rules = size, rules or Rules()
        self._program: dict[str, Callable[[State, int], State]] = {
            "obtain": self.obtain,
            "enter": self.enter,
            "post have": self.post_have,
            "await have": self.collect_have,
            "rollback": self.rollback,
            "take": self.take,
            "compute": self.compute,
            "save": self.save,
            "change": self.change,
            "commit": self.commit,
            "abandon": self.abandon,
            "close": self.close,
            **{f"post {name}": self.post for name in ROUNDS},
            **{f"await {name}": self.collect for name in ROUNDS},
        }

    def initial(self) -> State:
        """All machines have joined, and have version 0 of the state."""
        roster = (Roster if self.rules.all_wait else _Hasty)(self.size.machines)
        self._none, self._never = (None,) * self.size.machines, (NEVER,) * self.size.machines
        for p in range(self.size.machines):
            roster = roster.started(p)
        begun = Machine(0, "obtain", live=(0, 0), seen=self._none, late=self._never)
        machines = tuple(begun._replace(place=p) for p in range(self.size.machines))
        return State(machines, roster, losses=self.size.losses, cuts=self.size.cuts)

    def moves(self, s: State) -> Iterator[tuple[Event, State | Violation]]:
        """What can happen next, and what it leads to."""
        for i, m in enumerate(s.machines):
            if m.at in self._program:
                yield self.step(s, i)
                yield from self.faults(s, i)
            if m.at in ("dead", "exited") or m.cut:
                yield ("noticed", i), self.notice(s, i)
            if m.told:
                yield ("told", i), s.put(i, told=False, aborted=True)
        for number, (source, target, round_) in enumerate(s.stale):
            after = s._replace(stale=(*s.stale[:number], *s.stale[number + 1 :]))
            late = after.machines[target].late
            yield ("late", number), after.put(target, late=(*late[:source], round_, *late[source + 1 :]))
        for p in s.roster.starts:
            yield ("started", p), self.start(s, p)

    def faults(self, s: State, i: int) -> Iterator[tuple[Event, State]]:
        """A machine may be lost, and what it had sent may have arrived at some of the others and not at others."""
        m = s.machines[i]
        if i and s.losses:
            for after in self._losing(s, [(i, j) for j in range(len(s.machines)) if j != i]):
                yield ("killed", i), after.put(i, at="dead")._replace(losses=s.losses - 1)
        if i and s.cuts and not m.cut:
            others = [j for j in range(len(s.machines)) if j != i]
            for after in self._losing(s, [*((i, j) for j in others), *((j, i) for j in others)]):
                yield ("cut", i), after.put(i, cut=True)._replace(cuts=s.cuts - 1)

    def _losing(self, s: State, links: list[tuple[int, int]]) -> Iterator[State]:
        """All ways in which what is on its way over these links may still arrive or not."""
        if not links:
            yield s
            return
        (source, to), *rest = links
        m, posted = s.machines[to], s.machines[source].post
        if not (m.present and s.machines[source].present) or m.seen[source] is not None:
            yield from self._losing(s, rest)
            return
        for arrived in range(min(self._collected(m), posted), posted + 1):
            yield from self._losing(s.put(to, seen=(*m.seen[:source], arrived, *m.seen[source + 1 :])), rest)

    def _collected(self, m: Machine) -> int:
        """The last round that a machine has surely got from everyone."""
        return m.post - 1 if m.at.startswith("await") else m.post

    def step(self, s: State, i: int) -> tuple[Event, State | Violation]:
        """The next action of a machine; it leads nowhere else if it has to wait."""
        try:
            return ("step", i), self._program[s.machines[i].at](s, i)
        except Violation as violation:
            return ("step", i), violation

    def unseen(self, s: State) -> int | None:
        """A machine whose next action reads and writes only its own memory, and leaves it fit to be killed."""
        for i, m in enumerate(s.machines):
            own = m.at in ("save", "change", "abandon", "rollback") or (m.at == "enter" and m.mail == "in")
            if own or (m.at == "obtain" and not m.left and m.n == m.committed < self.size.operations):
                return i
        return None

    def describe(self, s: State, event: Event) -> str:
        """An event in words."""
        what, i = event
        if what == "late":
            return f"what machine {s.stale[i][0]} posted in an earlier generation arrives at machine {s.stale[i][1]}"
        if what == "told":
            return f"machine {i} is told that another is lost"
        m = s.machines[i]
        if what != "step":
            return f"machine {i} is {what}" + (f" at '{m.at}' of operation {m.n}" if what in checker.FAULTS else "")
        return f"machine {i}, operation {m.n}: {m.at}" + (f" {m.k}" if m.at in ("save", "change", "take") else "")

    def brief(self, s: State) -> str:
        """Where everyone is."""
        return ", ".join(f"machine {m.place} at '{m.at}' of operation {m.n}, {m.committed} counted" for m in s.machines)

    # ---- going on, doing again, catching up ----

    def obtain(self, s: State, i: int) -> State:
        """`Ledger._obtain`: take what the journal has; else enter the next generation; else recover, then try."""
        m = s.machines[i]
        if m.n == self.size.operations:
            if m.live != (m.n, m.n):
                raise Violation(f"machine {i} closes with {m.live}")
            roster = s.roster if m.cut else s.roster.speaks(i, Script.CLOSED)
            return s.put(i, at="close")._replace(roster=roster)
        if m.n < m.committed:
            return s.put(i, n=m.committed)
        if m.left:
            return s if m.cut else self._turn(s.put(i, at="enter"), s.roster.waits(i))
        if not m.shared:
            return s.put(i, at="post have")
        return s.put(i, at="compute" if m.recovered else "rollback")

    def enter(self, s: State, i: int) -> State:
        """Be in the generation that was announced."""
        if s.machines[i].mail != "in":
            return s
        return s.put(i, at="obtain", left=False, present=True, mail="")

    def post_have(self, s: State, i: int) -> State:
        """Say how many operations this machine has counted, and whether it has the state."""
        m = s.machines[i]
        return s.put(i, at="await have", post=0, have=NEVER if m.live == (NEVER, NEVER) else m.committed)

    def collect_have(self, s: State, i: int) -> State:
        """Whoever is behind takes over what those before it have counted."""
        m = s.machines[i]
        if not self._all_here(s, i, 0):
            return self._or_fail(s, i)
        most = max(s.machines[p].have for p in s.members)
        if m.committed > most:
            raise Violation(f"machine {i} has counted {m.committed} operations, but nobody has a state beyond {most}")
        if m.committed < most and self.rules.rolls_forward:
            s = s.put(i, committed=most)
            if m.have != NEVER and m.live != (most, most):
                raise Violation(f"machine {i} rolls forward to {most} with {m.live}")
        return s.put(i, at="obtain", shared=True)

    def rollback(self, s: State, i: int) -> State:
        """`State.rollback`: undo what nobody has counted, half by half."""
        m = s.machines[i]
        if m.mark == m.n + 1 and self.rules.rolls_back and m.k < 2:
            return s.put(i, live=half(m.live, m.k, m.backup[m.k]), k=m.k + 1)
        return s.put(i, at="post recovered", k=0)

    def take(self, s: State, i: int) -> State:
        """A newcomer is given the state by the first machine that has it, half by half, while others compute."""
        m = s.machines[i]
        donor = next(s.machines[p] for p in s.members if s.machines[p].have != NEVER and p != i)
        if donor.at in GONE or m.aborted:
            return s.put(i, at="abandon", k=0, live=(NEVER, NEVER))
        if m.k < 2:
            return s.put(i, live=half(m.live, m.k, donor.live[m.k]), k=m.k + 1)
        return s.put(i, at="compute" if self.rules.taken_first else "await result", k=0, have=m.committed)

    def abandon(self, s: State, i: int) -> State:
        """Forget what is private, and wait for the next generation."""
        return s.put(i, at="obtain", left=True, shared=False, recovered=False)

    # ---- one operation ----

    def compute(self, s: State, i: int) -> State:
        """Everyone computes from version n; then the result round begins."""
        return self._posted(s, i, "result")

    def post(self, s: State, i: int) -> State:
        """From now on it is on its way to everyone."""
        return self._posted(s, i, s.machines[i].at.removeprefix("post "))

    def _posted(self, s: State, i: int, name: str) -> State:
        saw = s.asked if name == "update" else s.machines[i].saw
        return s.put(i, at=f"await {name}", post=self._seq(s.machines[i].n, name), saw=saw)

    @staticmethod
    def _seq(n: int, name: str) -> int:
        return 1 + len(ROUNDS) * n + ROUNDS.index(name)

    def _all_here(self, s: State, i: int, seq: int) -> bool:
        m = s.machines[i]
        return m.present and all(p == i or self._arrived(s, m, p) >= seq for p in s.members)

    @staticmethod
    def _arrived(s: State, m: Machine, source: int) -> int:
        found = m.seen[source]
        return max(m.late[source], s.machines[source].post if found is None else found)

    def _or_fail(self, s: State, i: int) -> State:
        """Wait on, unless a machine is lost."""
        m = s.machines[i]
        return s.put(i, at="abandon", k=0) if m.aborted else s

    def collect(self, s: State, i: int) -> State:
        """Go on when all have posted."""
        m = s.machines[i]
        name = m.at.removeprefix("await ")
        waits = getattr(self.rules, f"{name}_round", True)
        if waits and not self._all_here(s, i, self._seq(m.n, name)):
            return self._or_fail(s, i)
        if name == "recovered":
            fresh = m.have == NEVER
            if fresh and not self.rules.taken_first:
                return s.put(i, at="take", recovered=True, k=0, post=self._seq(m.n, "result"))
            return s.put(i, at="take" if fresh else "compute", recovered=True, k=0)
        if name == "result":
            return s.put(i, at="save", k=0)
        return s.put(i, at="commit", leaves=any(s.machines[p].saw for p in s.members))

    def save(self, s: State, i: int) -> State:
        """The backup, then the mark."""
        m = s.machines[i]
        return s.put(i, at="change", backup=m.live, mark=m.n + 1, k=0)

    def change(self, s: State, i: int) -> State:
        """The update, half by half."""
        m = s.machines[i]
        live = half(m.live, m.k, m.live[m.k] + 1)
        return s.put(i, live=live, k=m.k + 1) if m.k == 0 else s.put(i, live=live, at="post update", k=0)

    def commit(self, s: State, i: int) -> State:
        """This machine counts the operation, and goes on to the next."""
        m = s.machines[i]
        if m.committed != m.n or m.live != (m.n + 1, m.n + 1):
            raise Violation(f"machine {i} counts operation {m.n} with {m.live} after {m.committed}")
        stays = not m.leaves
        return s.put(i, committed=m.n + 1, at="obtain", n=m.n + 1, left=m.leaves, shared=stays, recovered=stays)

    def close(self, s: State, i: int) -> State:
        """The process ends."""
        return s.put(i, at="exited")

    # ---- the head ----

    def notice(self, s: State, i: int) -> State:
        """The head finds that a machine is gone, or says nothing any more, and goes on without it for good."""
        m = s.machines[i]
        if m.cut and m.at not in GONE and not self.rules.lost_for_good and m.live[0] == m.live[1]:
            s = s._replace(ghosts=(*s.ghosts, (i, m.committed)))
        code = 0 if m.at == "exited" and not m.cut else -9
        gone = Machine(i, post=m.post, saw=m.saw, present=m.present, seen=self._none, late=self._never)
        s = s._replace(machines=(*s.machines[:i], gone, *s.machines[i + 1 :]))
        s = self._turn(s, s.roster.ended(i, code, s.machines[0].committed))
        having = [m for m in s.machines if m.at != "free" and m.live != (NEVER, NEVER)]
        if s.roster.is_over and not having and self.rules.over_for_all:
            for late in [m for m in s.machines if m.at != "free"]:
                roster = s.roster.gives_up(late.place, leaves=True)
                s = s.put(late.place, at="dead", present=False)._replace(roster=roster)
            s = s._replace(roster=s.roster._replace(starts=()))
        return s

    def start(self, s: State, p: int) -> State:
        """A machine joins, and is given what all have counted; it has no state yet."""
        members = [s.machines[q] for q in s.members if s.machines[q].at not in GONE]
        most = max((m.committed for m in members), default=0)
        given = most if not self.rules.gives_settled else max(most - 1, 0)
        before = s.machines[p]  # what it posted is still there for who has yet to look
        begun = Machine(p, "obtain", committed=given, seen=self._none, late=self._never)
        begun = begun._replace(post=before.post, saw=before.saw) if before.present else begun
        for place, version in s.ghosts:
            if place == p:
                begun = begun._replace(live=(version, version), committed=version)
        s = s._replace(machines=(*s.machines[:p], begun, *s.machines[p + 1 :]))
        return s._replace(roster=s.roster.started(p))

    def _turn(self, s: State, turn: "tuple[Roster, list[Decision]]") -> State:
        """Do what the roster has decided."""
        roster, decisions = turn
        workers = tuple(worker._replace(code=None) for worker in roster.workers)
        s = s._replace(roster=roster._replace(workers=workers, generation=0, restarts=0, failures=(), failed_at=None))
        for decision in decisions:
            if isinstance(decision, Lose):
                for m in s.machines:
                    if decision.was_member and self.rules.loss_aborts and m.at not in GONE:
                        s = s.put(m.place, told=True)
            elif isinstance(decision, Announce):
                s = self._announce(s, decision.members)
            elif isinstance(decision, Regroup):
                s = s._replace(asked=True)
            elif not isinstance(decision, Start):
                raise Violation(f"no script is at fault here, but the head decides on {decision}")
        return s

    def _announce(self, s: State, members: tuple[int, ...]) -> State:
        late = [
            (source, to.place, s.machines[source].post)
            for to in s.machines
            for source, found in enumerate(to.seen)
            if found is not None and found < s.machines[source].post and to.place in members
        ]
        machines = [
            m._replace(
                post=NEVER, saw=False, present=False, told=False, aborted=False, seen=self._none, late=self._never
            )
            for m in s.machines
        ]
        for i, m in enumerate(machines):
            if m.at == "enter" and i in members:
                machines[i] = m._replace(mail="in")
        stale = () if self.rules.generation_checked else tuple(late)
        return s._replace(machines=tuple(machines), members=members, stale=stale, asked=False)

    # ---- what must hold ----

    def invariant(self, s: State) -> None:
        """What holds in every state.

        Raises:
            Violation: It does not hold.
        """
        for m in s.machines:
            if m.at == "compute" and m.live != (m.n, m.n):
                raise Violation(f"machine {m.place} computes operation {m.n} from {m.live}")
        doing = {m.n for m in s.machines if m.at in ("save", "change", "post update") and not m.cut}
        if len(doing) > 1:
            raise Violation(f"machines are in different operations: {sorted(doing)}")

    def terminal(self, s: State) -> bool:
        """Whether the run is over: the head has closed, and nobody is left."""
        return not s.roster.starts and all(m.at == "free" for m in s.machines)


def check(size: Size, rules: Rules | None = None, *, all_orders: bool = False) -> Outcome:
    """Go through all states of a size; see `checker.check`. Without a rule, all orders are tried."""
    return checker.check(Model(size, rules), all_orders=all_orders or rules is not None)


SIZES = (
    Size(2, 3, losses=1),
    Size(2, 2, losses=2),
    Size(2, 2, losses=1, cuts=1),
    Size(3, 1, losses=1),
    Size(3, 1, cuts=1),
)
"""What the tests go through."""

NEEDED = {
    "update_round": Size(3, 2, losses=1),
    "rolls_forward": Size(2, 2, losses=1),
    "rolls_back": Size(2, 1, losses=1),
    "recovered_round": Size(2, 1, losses=1),
    "gives_settled": Size(2, 1, losses=1),
    "taken_first": Size(2, 1, losses=1),
    "generation_checked": Size(2, 1, losses=1),
    "loss_aborts": Size(2, 1, losses=1),
    "all_wait": Size(2, 1),
    "lost_for_good": Size(2, 2, cuts=1),
    "over_for_all": Size(2, 1, losses=1),
}
"""The rules that the protocol needs, each with a size at which that shows."""


def main() -> None:
    """Print the table, then what each rule is good for."""
    print("machines  operations  losses  cuts   states  terminal  seconds")
    for size in SIZES:
        outcome = check(size)
        print(
            f"{size.machines:8}  {size.operations:10}  {size.losses:6}  {size.cuts:4}  {outcome.states:7}  "
            f"{outcome.terminals:8}  {outcome.seconds:7.1f}" + (f"\n{outcome}" if outcome.violation else "")
        )
    for name, size in NEEDED.items():
        outcome = check(size, Rules(**{name: False}))
        print(f"\nwithout {name} ({outcome.states} states):\n{outcome}")


if __name__ == "__main__":
    main()
