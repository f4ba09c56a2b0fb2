"""Elections of an owner over a network that loses, delays and cuts, in simulated time: never two, and one at last."""

import random
from itertools import product

import pytest

from distopt.launch.agents.succession import ELECTION_SECONDS, Group, Members, Succession

STEP = 0.02
LOSSES = [(3, [0], [1, 2]), (2, [0], []), (2, [1], [0]), (4, [0], [1, 2, 3])]  # of how many which, and who goes on
LOSSES += [(4, [0, 1], []), (4, [2, 3], [0, 1]), (5, [0, 1], [2, 3, 4])]
SETTLE_SECONDS = 8.0  # of an undisturbed network, until one owner has all


class Agent:
    """A state machine, and the little of an agent that it needs: a link to the owner, ranks that run, a memory."""

    def __init__(self, net, number, memory=None):
        self.net, self.number = net, number
        self.memory, self.frozen_until, self.woke = memory, 0.0, -1e9
        self.inbox = []  # (time, message, reply to)
        self.link = None  # the agent that it reports to
        self.links = {}  # of an owner: agents that report to it
        self.running = None  # the version with which ranks of this agent run
        self.seen_term, self.proposed_at, self.offered = None, -1e9, None
        self.state = Succession(
            memory["me"] if memory else f"{number}.{net.numbers.getrandbits(32):x}",
            self.send,
            n_hosts=net.n_hosts,
            host=number if number < net.n_hosts else None,
            memory=memory,
            remember=lambda said: setattr(self, "memory", said),
            numbers=random.Random(net.numbers.getrandbits(32)),
            is_alone=net.alone,
        )
        net.where[self.state.me] = number

    def send(self, target, message):
        number = int(target[1:]) if target[0] == "@" else self.net.where.get(target)
        self.net.carry(self, number, message, target)

    def tick(self):
        net, state = self.net, self.state
        due = [item for item in self.inbox if item[0] <= net.now]
        self.inbox[:] = [item for item in self.inbox if item[0] > net.now]
        for _, message, sender in due:
            if callable(message):
                message()
            elif (answer := state.receive(message, net.now)) is not None:
                net.carry(self, sender, answer, None)
        state.tick(net.now)
        net.where[state.me] = self.number
        if state.is_owner:
            self.own()
        else:
            self.links, self.offered = {}, None
            self.follow()

    def leave(self):
        self.link = self.running = None

    def follow(self):
        net, state = self.net, self.state
        if self.seen_term is not None:  # it was an owner
            self.seen_term = None
            self.leave()
        if self.link is not None:
            owner, agent, since = self.link
            ended = net.agents[owner] is not agent or agent.links.get(self) is None
            reached = net.reaches(owner, self.number) and not net.is_frozen(owner)
            if ended and reached:
                state.link_lost(net.now)
                self.leave()
            elif state.leader() not in ("", agent.state.me) or (
                net.now > since + ELECTION_SECONDS and not state.is_led(net.now)
            ):
                self.leave()
        elif state.lead is not None:
            owner = net.where.get(state.lead["id"])
            agent = net.agents[owner] if owner is not None else None
            both = agent and net.reaches(owner, self.number) and net.reaches(self.number, owner)
            if both and not net.is_frozen(owner) and agent.state.is_owner and agent.state.me == state.lead["id"]:
                agent.links[self], agent.offered = self.state.me, None
                agent.state.connected(self.state.me, net.now)
                self.link = owner, agent, net.now
                state.linked()
            else:
                state.lead = None

    def own(self):
        net, state = self.net, self.state
        if self.seen_term != state.term:
            self.leave()
            self.links, self.offered, self.seen_term, self.proposed_at = {}, None, state.term, net.now
        for agent, name in list(self.links.items()):
            has_ended = net.agents[agent.number] is not agent or agent.link is None or agent.link[1] is not self
            if net.reaches(agent.number, self.number) if has_ended else state.is_silent(name, net.now):
                del self.links[agent]
                state.disconnected(name)
        wanted = frozenset([state.me, *self.links.values()])
        if wanted != self.offered and net.now > self.proposed_at + 0.5:
            self.offered, self.proposed_at, self.running = wanted, net.now, None
            info = {name: {"number": net.where[name]} for name in sorted(wanted)}
            term = state.term
            state.propose(info, {}, lambda: self.start(term, wanted), net.now)

    def start(self, term, wanted):
        net, version = self.net, self.state.members.version
        assert (self.state.is_owner, self.state.term) == (True, term)
        net.committed(self, version)
        self.running = version
        for agent in self.links:
            if agent.state.me in wanted:
                at = net.now + net.numbers.uniform(0.001, net.delay)  # on a connection, where nothing is lost
                agent.inbox.append((at, lambda agent=agent: agent.obey(self, version), self.number))

    def obey(self, owner, version):
        if self.link is not None and self.link[1] is owner:
            self.running = max(version, self.running or version)


class Net:
    def __init__(self, seed, count, n_hosts, *, alone=False):
        self.numbers, self.now, self.n_hosts, self.alone = random.Random(seed), 100.0, n_hosts, alone
        self.cut, self.loss, self.delay = set(), 0.0, 0.02
        self.where, self.owners, self.newest = {}, {}, (0, 0)
        self.commits, self.memories, self.agents = 0, [None] * count, [None] * count
        self.agents = [Agent(self, number) for number in range(count)]

    def reaches(self, source, target):
        return (source, target) not in self.cut

    def is_frozen(self, number):
        agent = self.agents[number]
        return agent is None or self.now < agent.frozen_until

    def carry(self, sender, number, message, target):
        if number is None or not self.reaches(sender.number, number) or self.numbers.random() < self.loss:
            return
        at = self.now + self.numbers.uniform(0.001, self.delay)
        agent = self.agents[number]
        if target is not None and (agent is None or (target[0] != "@" and agent.state.me != target)):
            if self.reaches(number, sender.number):  # its host refuses connections
                sender.inbox.append((at, lambda: sender.state.unreachable(target, self.now, is_refused=True), None))
        elif agent is not None:
            agent.inbox.append((at, message, sender.number))

    def committed(self, agent, version):
        assert self.alone or version > self.newest, "an owner has started ranks after a newer one"
        self.newest, self.commits = version, self.commits + 1

    def kill(self, number):
        if self.agents[number] is not None:
            self.memories[number] = self.agents[number].memory
            self.agents[number] = None

    def start(self, number, *, remembers=True):
        if self.agents[number] is None:
            self.agents[number] = Agent(self, number, self.memories[number] if remembers else None)

    def run(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.now += STEP
            for agent in self.numbers.sample(self.agents, len(self.agents)):
                if agent is not None and self.now >= agent.frozen_until:
                    if agent.frozen_until > agent.woke:
                        agent.woke = self.now
                    agent.tick()
            self.check()

    def check(self):
        live = [agent for agent in self.agents if agent is not None and agent.state.is_owner]
        for agent in live:
            if agent.seen_term == agent.state.term and not agent.state.members.is_fresh and not self.alone:
                # Of one term, there is one owner: another has been elected by the same voters.
                assert self.owners.setdefault(agent.state.term, agent.state.me) == agent.state.me
        leases = [agent for agent in live if self.now >= agent.frozen_until and agent.state.has_lease(self.now)]
        assert len(leases) < 2 or self.alone, [(agent.number, agent.state.term) for agent in leases]
        # One that has been frozen ends its ranks soon after.
        awake = [agent for agent in live if agent.running and self.now > max(agent.frozen_until, agent.woke) + 2.7]
        assert len(awake) < 2 or self.alone, [(agent.number, agent.state.term, agent.running) for agent in awake]

    def settled(self):
        self.run(SETTLE_SECONDS)
        awake = [agent for number, agent in enumerate(self.agents) if not self.is_frozen(number)]
        versions = [agent.running for agent in awake if agent.state.is_owner and agent.running]
        assert len(versions) < 2
        return [agent.number for agent in awake if agent.running in versions]


def test_a_quorum_is_more_than_half_or_half_with_the_owner():
    """Two of them have a member in common; and a list of members survives its message."""
    enough = [("abc", "bc"), ("ab", "a"), ("abcd", "ab"), ("abcd", "bcd"), ("a", "a")]
    for ids, present in [*enough, ("abc", "a"), ("ab", "b"), ("abcd", "bc"), ("a", "")]:
        assert Group("a", tuple(ids)).has_quorum(present) == ((ids, present) in enough), (ids, present)
    for size in range(1, 7):
        group = Group("0", tuple(map(str, range(size))))
        sets = [{str(i) for i in range(size) if bits >> i & 1} for bits in range(1 << size)]
        quorums = [each for each in sets if group.has_quorum(each)]
        assert all(one & other for one in quorums for other in quorums)
    members = Members((3, 4), (Group("a", ("a", "b")), Group("b", ("b",))), {"a": {"port": 1}}, {"name": "j"})
    assert Members.from_json(members.to_json()) == members


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("n_hosts", [1, 2, 3])
def test_a_job_begins_once_wherever_its_agents_meet(count, n_hosts):
    net = Net(count, count, min(n_hosts, count))
    assert net.settled() == list(range(count))


@pytest.mark.parametrize("kind", ["kill", "freeze", "cut"])
@pytest.mark.parametrize(("count", "lost", "left"), LOSSES)
def test_more_than_half_go_on_or_half_with_the_owner(kind, count, lost, left):
    net = Net(7, count, 1)
    assert net.settled() == list(range(count))
    rest = [number for number in range(count) if number not in lost]
    for number in lost:
        if kind == "kill":
            net.kill(number)
        elif kind == "freeze":
            net.agents[number].frozen_until = net.now + 12.0
        else:
            net.cut |= {*product([number], rest), *product(rest, [number])}
    running = net.settled()
    if left or kind != "cut":
        assert [number for number in running if number in rest] == left
    else:
        assert running == lost  # half of them, with the owner
    for number in lost:  # they come back
        net.start(number)
    net.cut.clear()
    net.run(10.0)
    assert net.settled() == list(range(count))


def test_cuts_in_one_direction_and_agents_that_are_alone_or_fresh():
    net = Net(3, 2, 1, alone=True)
    assert net.settled() == [0, 1]
    net.cut = {(0, 1), (1, 0)}
    net.run(10.0)
    assert all(agent.state.is_owner and agent.running for agent in net.agents)
    net.cut = set()
    assert net.settled() == [0, 1]
    assert net.agents[0].state.is_owner
    net = Net(5, 3, 1)
    assert net.settled() == [0, 1, 2]
    net.kill(0)
    assert net.settled() == [1, 2]
    net.start(0, remembers=False)
    assert net.settled() == [0, 1, 2]
    assert not net.agents[0].state.is_owner
    for seed in range(10):
        net = Net(seed, 3, 1)
        net.settled()
        net.cut = {(0, 1), (0, 2)} if seed % 2 else {(1, 0), (2, 0)}
        assert net.settled() == [1, 2]
        net.cut = set()
        assert net.settled() == [0, 1, 2]


def disturb(net, count):
    numbers = net.numbers
    kind = numbers.choice(["kill", "start", "freeze", "cut", "way", "mend", "slow", "lossy"])
    number = numbers.randrange(count)
    if kind == "kill":
        net.kill(number)
    elif kind == "start":
        for other in range(count):
            net.start(other)
    elif kind == "freeze" and net.agents[number] is not None:
        net.agents[number].frozen_until = net.now + numbers.uniform(0.2, 6.0)
    elif kind == "cut":
        half = set(numbers.sample(range(count), numbers.randrange(1, count)))
        net.cut = {(a, b) for a in range(count) for b in range(count) if (a in half) != (b in half)}
    elif kind == "way":
        net.cut.add((number, numbers.randrange(count)))
    elif kind == "mend":
        net.cut.clear()
    elif kind == "slow":
        net.delay = numbers.choice([0.02, 0.1, 0.4])
    elif kind == "lossy":
        net.loss = numbers.choice([0.0, 0.05, 0.3])


@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(10))
def test_random_faults_never_lead_to_two_owners_and_always_to_one(count, seed):
    net = Net(100 * count + seed, count, 1 + seed % min(3, count))
    assert net.settled() == list(range(count))
    for _ in range(25):
        disturb(net, count)
        net.run(net.numbers.choice([0.3, 1.0, 3.0]))
    for number in range(count):
        net.start(number)
    net.cut, net.loss, net.delay = set(), 0.0, 0.02
    net.run(10.0)
    assert net.settled() == list(range(count))
    assert net.commits > 1
