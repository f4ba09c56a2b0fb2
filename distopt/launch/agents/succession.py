"""Who decides for a job that heals, once its owner is lost: an election of the last members, without a socket.

The algorithm is Raft's election (D. Ongaro, J. Ousterhout, "In Search of an Understandable Consensus Algorithm", 2014,
section 5.2: one vote a term, more than half of the members) with its change of members by joint consensus (section 6),
and from Ongaro's thesis (2014) the question before a vote (section 9.6), so that an agent that was cut off does not
disturb the others. There is no log: the newest list of members takes the place of its last entry. A list has a version,
and an agent with an older list gets no vote (5.4.1). An owner starts ranks only once its list has been accepted,
in its term, by a quorum of the lists before, so that a former one that wakes up starts none (5.4.2: nor does a new one
by what it has not proposed itself).

**A quorum** of a list is more than half of its members, or half with the owner that proposed it. Any two have a member
in common.

**Leases.** A member that has heard its owner less than `ELECTION_SECONDS` ago votes for no other. An owner without an
echo of a quorum to what it sent less than `SILENT_SECONDS` ago steps down, and its agent ends its ranks. So an owner
that is cut off has ended its ranks before another starts any; both count on clocks that run at the same rate, not on
messages that arrive in time. A member whose owner's process has ended for certain, since its host refuses connections
to that port, need not wait.

**The first owner** is elected in the same way by the hosts of `--rdzv-endpoint`, the first of which counts as owner
before; a host that refuses connections counts as a vote, since it has no agent. An agent that is fresh, without a list,
asks only those and the members that it remembers (`distopt.launch.agents.memory`).

Messages, by "kind": `ask` for a vote, or before it ("pre"); `vote`, its answer; `beat` of an owner, with the list that
a member lacks; `echo`, its answer; `probe` of an owner to agents that may follow another; `probed`, its answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

BEAT_SECONDS = 0.3  # between two signs of life of an owner
SILENT_SECONDS = 1.5  # then an agent without an echo counts as cut off
ELECTION_SECONDS = 1.8  # then a member without a sign of life of its owner may vote for another
_ASK_SECONDS = 0.3, 0.6  # between two rounds of questions, at random
_DOUBT_SECONDS = 0.1, 0.2  # the same, while it is not certain that the owner is lost
_TURN_SECONDS = 0.1  # each member stands for so long after the one before in the list
_ALONE_SECONDS = 3.0  # without an owner; then a member of a minority continues, with --alone
_PROBE_SECONDS = 0.5
_BLOCKED_SECONDS = 3.0  # a fresh agent that has met a member of a job begins no other for so long
_SUSPENDED_SECONDS = 1.0  # between two looks: then this process was suspended, perhaps with all others
_KEPT_BEATS = 16

Message = dict[str, Any]
Version = tuple[int, int]  # the term of the owner that has made a list, and its number


@dataclass(frozen=True)
class Group:
    """Members that decide by quorum.

    Attributes:
        owner: the id of the one that proposed them.
        ids: of all.
    """

    owner: str
    ids: tuple[str, ...]

    def has_quorum(self, present: Iterable[str]) -> bool:
        """Whether these are enough of them."""
        count = 2 * len(set(self.ids).intersection(present))
        return count > len(self.ids) or (count == len(self.ids) and self.owner in present)


@dataclass(frozen=True)
class Members:
    """A list of members.

    Attributes:
        version: the larger, the newer; (0, 0): the hosts of `--rdzv-endpoint`, before there is a list.
        groups: each must agree to what is decided; several until those before have accepted the last one.
        info: of each member, by id.
        job: of the job.
        origin: which first owner began it; agents of another job are strangers.
    """

    version: Version
    groups: tuple[Group, ...]
    info: dict[str, Message] = field(default_factory=dict)
    job: Message = field(default_factory=dict)
    origin: str = ""

    @property
    def is_fresh(self) -> bool:
        """Whether nobody has made a list yet."""
        return self.version == (0, 0)

    def have_quorum(self, present: Iterable[str]) -> bool:
        """Whether these are enough of each group."""
        return all(group.has_quorum(present) for group in self.groups)

    def to_json(self) -> Message:
        """As a part of a message."""
        groups = [[group.owner, *group.ids] for group in self.groups]
        return {"version": self.version, "groups": groups, "info": self.info, "job": self.job, "origin": self.origin}

    @classmethod
    def from_json(cls, said: Message) -> Members:
        """The inverse of `to_json`."""
        term, number = said["version"]
        groups = tuple(Group(owner, tuple(ids)) for owner, *ids in said["groups"])
        return cls((term, number), groups, said["info"], said["job"], said["origin"])


class Succession:
    """The state of one agent. Time is an argument, and counts seconds; messages go out by `send`.

    Args:
        me: the id of this agent.
        send: takes the id of an agent, or "@0" for the first host of the endpoint and so on, and a message.
        n_hosts: how many hosts the endpoint has.
        host: which of them is this one; None: none.
        is_alone: whether a minority may continue.
        is_fixed: whether the job needs all its nodes: a member without an owner may then come to an agent that begins.
        memory: what a former process in its place has given to `remember`.
        remember: gets what the next one needs, before anything is sent that depends on it.
        numbers: spread the questions.

    Attributes:
        term: the newest that it knows.
        members: the newest list.
        is_owner: whether this agent decides.
        is_solo: whether it does so without a quorum, by --alone.
        lead: the owner that it knows: "id", "term", "address", "port" and more; None: none, or this agent.
        port: where this agent accepts agents as an owner.
    """

    def __init__(
        self,
        me: str,
        send: Callable[[str, Message], None],
        *,
        n_hosts: int,
        host: int | None,
        is_alone: bool = False,
        is_fixed: bool = False,
        memory: Message | None = None,
        remember: Callable[[Message], None] = lambda _: None,
        numbers: random.Random | None = None,
    ) -> None:
        self.me, self._send, self._host = me, send, host
        self._is_alone, self._is_fixed, self._keep = is_alone, is_fixed, remember
        self._numbers = numbers or random.Random()
        hosts = tuple(f"@{number}" for number in range(n_hosts))
        self.members = self._first = Members((0, 0), (Group(hosts[0], hosts),))
        self._hosts = [each for each in hosts if each != f"@{host}"]
        self._remembered = Members.from_json(memory["members"]) if memory and memory["members"] else None
        self.term = int(memory["term"]) if memory else 0
        self._voted = str(memory["voted"]) if memory else ""
        self.is_owner = self.is_solo = False
        self.lead: Message | None = None
        self.port = 0
        # Of a member:
        self._owner = ""  # whose signs of life count
        self._heard = float("-inf")  # when it gave the last one
        self._is_in_doubt = False  # a connection to it has ended
        self._seeks_since = float("inf")
        self._ask_at = float("-inf")
        self._round, self._is_pre, self._asked_at = 0, True, 0.0
        self._grants: set[str] = set()
        self._answered: set[str] = set()  # by whom, in this round
        self._before: set[str] = set()  # in the last one
        self._ended: set[str] = set()  # whose process has ended for certain
        self._blocked_until = float("-inf")
        self._looked = float("inf")
        # Of an owner:
        self._beat_at = self._probe_at = float("-inf")
        self._beats: dict[int, float] = {}  # when each was sent
        self._n_beats = 0
        self._echoed: dict[str, float] = {}  # by agent: when the beat was sent whose echo came last
        self._excused: dict[str, float] = {}  # by agent: when it came, or this process continued after a suspension
        self._accepted: dict[str, Version] = {}
        self._connected: dict[str, float] = {}  # agents that report to this owner, and since when
        self._lost: set[str] = set()  # members of former lists
        self._then: Callable[[], None] | None = None  # what to do once the list is accepted

    # -- what the agent asks and says ------------------------------------------------------------------------------
    def is_led(self, now: float) -> bool:
        """Whether another agent decides, and is heard."""
        return not self.is_owner and not self._is_in_doubt and self._hears_owner(now)

    def decides(self, now: float) -> bool:
        """Whether enough members of this owner are present."""
        return self.is_owner and (self.members.is_fresh or self.members.have_quorum(self._present(now)))

    def has_lease(self, now: float) -> bool:
        """Whether no other agent can have become the owner: a quorum has echoed lately, or it does without one."""
        recent = {self.me, *self._recent(now)}
        return self.is_owner and (self.is_solo or (not self.members.is_fresh and self.members.have_quorum(recent)))

    def leader(self) -> str:
        """The id of the owner that is heard, or was last; empty: none."""
        return self.me if self.is_owner else self._owner

    def tick(self, now: float) -> None:
        """Act on the time; call this every tenth of a second or so."""
        if now > self._looked + _SUSPENDED_SECONDS:  # perhaps with all others: they resume within a second
            self._heard = max(self._heard, now + 1.0 if self._owner else self._heard)
            self._excused |= dict.fromkeys(self._present(self._looked) - {self.me}, now + 1.0)
        self._looked = now
        if self.is_owner:
            if not self.decides(now):
                if not self._is_alone:
                    self._step_down(now)
                    return
                self.is_solo = True
            if now >= self._beat_at:
                self._beat(now)
            if now >= self._probe_at:
                self._probe_at = now + _PROBE_SECONDS
                known = {*self.members.info, *self._connected}
                for target in (*self._hosts, *sorted(self._lost - known)):
                    self._send(target, self._signed("probe", lead=self._hint(now)))
        elif self.is_led(now):
            self._seeks_since = float("inf")
        else:
            if self._seeks_since == float("inf"):
                self._seeks_since = now
                self._answered, self._before = set(), set()
                self._ask_at = max(self._ask_at, now + self._turn() * _TURN_SECONDS)
            if self._is_alone and now > self._seeks_since + _ALONE_SECONDS and self.may_stand:
                self.term, self._voted = self.term + 1, self.me
                self._remember()
                self._grants, self._asked_at = set(), now
                self._lead(now, is_solo=not self.members.is_fresh)
            elif now >= self._ask_at:
                self._ask(now, is_pre=True)

    def link_lost(self, now: float) -> None:
        """The connection to the owner has ended: ask it and the others at once."""
        self._is_in_doubt = True
        if self._owner:
            self._send(self._owner, self._signed("probe", lead=None))

    def linked(self) -> None:
        """This agent reports to `lead`."""
        self._is_in_doubt = False

    def connected(self, agent: str, now: float) -> None:
        """An agent reports to this owner."""
        self._connected[agent] = now
        self._excused[agent] = now
        self._beat_at = float("-inf")

    def disconnected(self, agent: str) -> None:
        """It does so no longer."""
        self._connected.pop(agent, None)
        self._echoed.pop(agent, None)
        self._excused.pop(agent, None)

    def is_silent(self, agent: str, now: float) -> bool:
        """Whether an agent that reports to this owner gives no sign of life."""
        return agent in self._connected and agent not in self._present(now)

    def propose(self, info: dict[str, Message], job: Message, then: Callable[[], None], now: float) -> None:
        """Make a list of members, and call `then` once a quorum of all lists that may count has accepted it."""
        self._lost |= set(self.members.info) - {self.me}
        before = () if self.members.is_fresh or self.is_solo else self.members.groups
        groups = tuple(dict.fromkeys((*before, Group(self.me, tuple(info)))))
        self._renew(groups, {**(self.members.info if before else {}), **info}, job)
        self._then = then
        self._beat(now)
        self._commit_if_accepted(now)

    def receive(self, message: Message, now: float) -> Message | None:
        """Act on a message of another agent; the answer to it."""
        kind = message["kind"]
        if kind == "ask":
            return self._on_ask(message, now)
        if kind == "beat":
            return self._on_beat(message, now)
        if kind == "vote":
            self._on_vote(message, now)
        elif kind == "echo":
            self._on_echo(message, now)
        elif kind == "probe":
            self._found(message["lead"], now)
            return self._signed("probed", lead=self._hint(now))
        elif kind == "probed":
            self._found(message["lead"], now)
        return None

    def unreachable(self, target: str, now: float, *, is_refused: bool) -> None:
        """Note that an agent cannot be called. `is_refused`: its host answers that no process listens."""
        if not is_refused or self.is_owner:
            return
        self._ended.add(target)
        if target == self._owner:
            self._forget_owner()
            self._ask_at = now + self._turn() * _TURN_SECONDS
        if target.startswith("@"):
            self._grants.add(target)
            self._count(now)

    def reached(self) -> list[str]:
        """The members of the last list that have answered lately, this one included."""
        answered = {self.me, *self._answered, *self._before}
        return [member for member in self.members.groups[-1].ids if member in answered]

    # -- of a member -----------------------------------------------------------------------------------------------
    def _hears_owner(self, now: float) -> bool:
        return bool(self._owner) and now <= self._heard + ELECTION_SECONDS

    def _forget_owner(self) -> None:
        self._owner, self.lead, self._heard, self._is_in_doubt = "", None, float("-inf"), False

    def _turn(self) -> int:
        ids = [member for member in self.members.groups[-1].ids if member != self.members.groups[-1].owner]
        return ids.index(self.me) if self.me in ids else len(ids) if not self.members.is_fresh else self._host or 0

    @property
    def may_stand(self) -> bool:
        """Whether this agent may become the owner."""
        own = {self.me, f"@{self._host}"}
        return any(own.intersection(group.ids) for group in self.members.groups)

    def _ask(self, now: float, *, is_pre: bool) -> None:
        self._round, self._is_pre, self._asked_at = self._round + 1, is_pre, now
        self._grants = {self.me, f"@{self._host}"}
        self._ask_at = now + self._numbers.uniform(*(_DOUBT_SECONDS if self._is_in_doubt else _ASK_SECONDS))
        if is_pre:
            self._before, self._answered = self._answered, set()
        term = self.term + 1 if is_pre else self.term
        version = self.members.version
        targets = {**self.members.info, **(self._remembered.info if self._remembered else {})}
        for target in (*self._hosts, *(each for each in targets if each != self.me)):
            content = {"term": term, "version": version, "origin": self.members.origin, "round": self._round}
            self._send(target, self._signed("ask", pre=is_pre, **content))
        self._count(now)

    def _count(self, now: float) -> None:
        """Count the grants of this round."""
        if self.is_owner or self._hears_owner(now) or not self.may_stand:
            return
        if self.members.is_fresh:
            remembered = set(self._remembered.info) - {self.me} if self._remembered else set()
            # A job that this host was part of may run where it cannot be seen.
            if now < self._blocked_until or remembered - self._answered - self._before - self._ended:
                return
        if not self.members.have_quorum(self._grants):
            return
        if self._is_pre:
            self.term, self._voted = self.term + 1, self.me
            self._remember()
            self._ask(now, is_pre=False)
        else:
            self._lead(now)

    def _on_ask(self, message: Message, now: float) -> Message:
        sender, term, version = message["from"], message["term"], tuple(message["version"])
        if version > (0, 0):
            self._met_a_member(version, message["origin"], now)
        if sender == self._owner:  # it no longer owns
            self._forget_owner()
        is_led = self._hears_owner(now)
        if self.is_owner:
            is_led = self.is_solo or self.decides(now)
        granted = not is_led and version >= self.members.version
        granted &= self.members.is_fresh or message["origin"] == self.members.origin
        granted &= term > self.term or (not message["pre"] and term == self.term and self._voted in ("", sender))
        if granted and not message["pre"]:
            if self.is_owner:
                self._step_down(now)
            self.term, self._voted = term, sender
            self._end_round()
            self._forget_owner()
            self._remember()
            self._ask_at = now + self._numbers.uniform(*_ASK_SECONDS)
        return self._signed(
            "vote",
            pre=message["pre"],
            round=message["round"],
            granted=granted,
            term=self.term,
            version=self.members.version,
            origin=self.members.origin,
            host=self._host,
            lead=self._hint(now),
        )

    def _on_vote(self, message: Message, now: float) -> None:
        if self.is_owner:
            return
        self._answered |= {message["from"], f"@{message['host']}"}
        self._ended.discard(message["from"])
        self._take_term(message["term"])
        if message["lead"] is not None:
            self._found(message["lead"], now)
        elif tuple(message["version"]) > (0, 0):
            self._met_a_member(tuple(message["version"]), message["origin"], now)
        if message["granted"] and (message["round"], message["pre"]) == (self._round, self._is_pre):
            self._grants |= {message["from"], f"@{message['host']}"}
            self._count(now)

    def _met_a_member(self, version: Version, origin: str, now: float) -> None:
        """A job lives: a fresh agent takes the place of its former process in it, or begins no other."""
        if not self.members.is_fresh:
            return
        if self._remembered is not None and self._remembered.origin == origin:
            self.members, self._remembered = self._remembered, None
        elif not self._is_fixed:
            self._blocked_until = now + _BLOCKED_SECONDS
        elif version[0] < self.term:  # the member may come to this agent, whose lists are newer
            return
        else:
            self._take_term(version[0])
        if self.is_owner:
            self._step_down(now)

    def _on_beat(self, message: Message, now: float) -> Message:
        sender, term, lead = message["from"], message["term"], message["lead"]
        behind = self._signed("echo", term=self.term, n=-1, version=self.members.version)
        if term < self.term:
            return behind
        if sender != self._owner and (self.is_owner or self._hears_owner(now)):
            own = self._hint(now)
            if own is not None and _rank(own) > _rank(lead):
                return behind
        if self.is_owner:
            self._give_way(now)
            if term < self.term:
                return behind
        self._take_term(term)
        self._owner, self._heard, self.lead = sender, now, lead
        if (said := message.get("members")) is not None:
            members = Members.from_json(said)
            if members.version > self.members.version:
                self.members, self._remembered = members, None
                self._remember()
        return self._signed("echo", term=self.term, n=message["n"], version=self.members.version)

    def _found(self, lead: Message | None, now: float) -> None:
        """Another agent says that it, or a third one, decides."""
        if lead is None or lead["id"] == self.me:
            return
        if self.is_owner:
            own = self._hint(now)
            if own is None or _rank(own) > _rank(lead):
                return
            self._give_way(now)
        if not self.is_led(now) and (self.members.is_fresh or not lead["fresh"] or self._is_fixed):
            self.lead = lead

    def _take_term(self, term: int) -> None:
        if term > self.term:
            self.term, self._voted = term, ""
            self._end_round()
            self._remember()

    def _end_round(self) -> None:
        """The grants of this one are of an older term."""
        self._round, self._grants = self._round + 1, set()

    def _remember(self) -> None:
        members = self._remembered or self.members
        self._keep(
            {
                "me": self.me,
                "term": self.term,
                "voted": self._voted,
                "members": None if members.is_fresh else members.to_json(),
            }
        )

    def _signed(self, kind: str, **content: Any) -> Message:
        return {"kind": kind, "from": self.me, **content}

    def _hint(self, now: float) -> Message | None:
        """The owner that this agent knows, for others; without an address it is on the host of the sender."""
        if self.is_owner:
            fresh, solo = self.members.is_fresh, self.is_solo
            return {"id": self.me, "term": self.term, "address": "", "port": self.port, "fresh": fresh, "solo": solo}
        return self.lead if self._hears_owner(now) else None

    # -- of an owner -----------------------------------------------------------------------------------------------
    def _lead(self, now: float, *, is_solo: bool = False) -> None:
        self._forget_owner()
        self.is_owner, self.is_solo, self._seeks_since = True, is_solo, float("inf")
        self._echoed = dict.fromkeys(self._grants, self._asked_at)
        self._accepted, self._connected, self._excused = {}, {}, {}
        self._beat(now)

    def _step_down(self, now: float) -> None:
        self.is_owner = self.is_solo = False
        self._then = None
        self._forget_owner()
        self._ask_at = now

    def _give_way(self, now: float) -> None:
        """Give way to another owner; after decisions without a quorum, which no other may trust, as another agent."""
        if self.is_solo:
            self.me = f"{self._numbers.getrandbits(48):012x}"
            self.term, self._voted, self.members, self._remembered = 0, "", self._first, None
            self._remember()
        self._blocked_until = now + _BLOCKED_SECONDS
        self._step_down(now)

    def _present(self, now: float) -> set[str]:
        """The agents that count as present. Only an echo proves it: see `_commit_if_accepted`."""
        times = (*self._echoed.items(), *self._excused.items())
        return {self.me, *(each for each, at in times if now <= at + SILENT_SECONDS)}

    def _recent(self, now: float) -> set[str]:
        """Agents with a recent echo. An echo that came while this process was suspended does not count.

        Others may have elected another owner meanwhile.
        """
        return {each for each, at in self._echoed.items() if now <= at + SILENT_SECONDS}

    def _beat(self, now: float) -> None:
        self._beat_at = now + BEAT_SECONDS
        self._n_beats += 1
        self._beats[self._n_beats] = now
        self._beats.pop(self._n_beats - _KEPT_BEATS, None)
        beat = self._signed("beat", term=self.term, n=self._n_beats, lead=self._hint(now))
        for agent in {**self.members.info, **self._connected}:
            if agent == self.me:
                continue
            lacks = agent in self.members.info and self._accepted.get(agent) != self.members.version
            self._send(agent, {**beat, "members": self.members.to_json()} if lacks else beat)

    def _on_echo(self, message: Message, now: float) -> None:
        sender, term = message["from"], message["term"]
        if term > self.term:
            self._take_term(term)
            if self.is_owner:
                self._step_down(now)
        if not self.is_owner or term != self.term or message["n"] not in self._beats:
            return
        self._echoed[sender] = max(self._echoed.get(sender, 0.0), self._beats[message["n"]])
        self._accepted[sender] = tuple(message["version"])
        self._commit_if_accepted(now)

    def _commit_if_accepted(self, now: float) -> None:
        version = self.members.version
        accepted = {self.me, *(each for each in self._recent(now) if self._accepted.get(each) == version)}
        if self._then is not None and self.members.have_quorum(accepted):
            then, self._then = self._then, None
            last = self.members.groups[-1]
            info = {member: self.members.info[member] for member in last.ids}
            self._renew((last,), info, self.members.job)
            self._beat(now)
            then()

    def _renew(self, groups: tuple[Group, ...], info: dict[str, Message], job: Message) -> None:
        _, number = self.members.version
        origin = self.members.origin or f"{self.me} {self.term}"
        self.members = Members((self.term, number + 1), groups, info, job, origin)
        self._remembered = None
        self._remember()


def _rank(lead: Message) -> tuple[bool, bool, int, str]:
    """Of two owners, the one with the smaller rank gives way."""
    return not lead["fresh"], not lead["solo"], lead["term"], lead["id"]
