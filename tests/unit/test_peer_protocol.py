"""The exchange through the peers' memory as a model: no order of events deadlocks, or overwrites what is still read.

Every rank runs layers' calls on streams as `compile_overlap.peers` issues them (the order is the schedule's); hypothesis
picks which stream of which rank goes on next. Buffers hold the number of the call that wrote them.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_overlap.schedule import FORWARD, GEMM, START, WAIT, Plan, Work, build

MAIN, OTHER, SENDING = "main", "other", "sending"
ALL, SOME, NONE, HEAD = "all", "some", "none", "head"


class Machine:
    """Flags, inboxes and results of all ranks. An operation is a function that returns False while it has to wait."""

    def __init__(self, ranks):
        self.ranks = range(ranks)
        self.flags, self.inbox, self.results, self.events = {}, {}, {}, set()
        self.reading = set()  # (rank, "inbox" or "results", chunk): written, and not read for the last time

    def record(self, event):
        return lambda: self.events.add(event) or True

    def wait(self, event):
        return lambda: event in self.events

    def raise_flag(self, owner, key):
        def run():
            if self.flags.get((owner, key)):
                return False
            self.flags[owner, key] = True
            return True

        return run

    def take_flag(self, owner, key):
        return lambda: bool(self.flags.pop((owner, key), False))

    def write(self, memory, owner, chunk, writer, call):
        def run():
            assert (owner, memory, chunk, writer) not in self.reading, f"call {call} overwrites what rank {owner} reads"
            getattr(self, memory)[owner, chunk, writer] = call
            self.reading.add((owner, memory, chunk, writer))
            return True

        return run

    def read(self, memory, rank, chunk, call, last):
        def run():
            for writer in self.ranks:
                found = getattr(self, memory).get((rank, chunk, writer))
                assert found == call, f"rank {rank} reads call {found} of rank {writer}, chunk {chunk}, in call {call}"
                if last:
                    self.reading.discard((rank, memory, chunk, writer))
            return True

        return run

    def tell(self, rank, channel):
        return [self.raise_flag(other, (channel, rank)) for other in self.ranks if other != rank]

    def told(self, rank, channel):
        return [self.take_flag(rank, (channel, other)) for other in self.ranks if other != rank]


def sent(machine, rank, call, chunk):
    """Rows that copy engines put, with a signal to each owner."""
    others = [each for each in machine.ranks if each != rank]
    issued = [(SENDING, machine.wait(("issued", rank, call, chunk)))]
    for other in others:
        issued.append((SENDING, machine.write("inbox", other, chunk, rank, call)))
        issued.append((SENDING, machine.raise_flag(other, (chunk, rank))))
    issued.append((SENDING, machine.write("inbox", rank, chunk, rank, call)))
    return [*issued, (SENDING, machine.record(("sent", rank, call, chunk)))]


def arrived(machine, rank, call, chunk, stream):
    others = [each for each in machine.ranks if each != rank]
    flags = [(stream, machine.take_flag(rank, (chunk, other))) for other in others]
    return [(stream, machine.wait(("sent", rank, call, chunk))), *flags]


def call_of(machine, rank, call, before, chunks, stream, stored=ALL, captured=False):
    """What one call issues: (stream, operation), in the host's order. Of its first chunk a kernel has `stored` so much.

    The others of its tokens, where it stored some, are put when the first GEMM has been issued for these.
    """
    issued = []
    if before not in (None, stream) and not captured:  # behind all that this one has been given
        issued = [(before, machine.record(("given", rank, call))), (stream, machine.wait(("given", rank, call)))]
    schedule = build(FORWARD, Plan((4,) * chunks, ratio_16ths=1, peers=True), (Work(2),) * chunks)
    for step in schedule.steps:
        chunk = step.chunk
        at_once = ALL if chunk == 0 and stored == ALL else SOME if chunk == 0 and stored == SOME else NONE
        if step.kind == START and step.exchange == 1 and at_once != NONE:
            part = 0 if at_once == ALL else HEAD
            issued += [(stream, machine.write("inbox", each, part, rank, call)) for each in machine.ranks]
            issued += [(stream, each) for each in machine.tell(rank, "inbox") + machine.told(rank, "inbox")]
        elif step.kind == START and step.exchange == 1:
            issued.append((stream, machine.record(("issued", rank, call, chunk))))
            issued += sent(machine, rank, call, chunk)
        elif step.kind == WAIT and step.exchange == 1 and at_once != NONE:
            issued.append((stream, machine.record(("issued", rank, call, chunk))))
            if at_once == SOME:
                issued.append((stream, machine.read("inbox", rank, HEAD, call, last=False)))
                issued += sent(machine, rank, call, chunk) + arrived(machine, rank, call, chunk, stream)
        elif step.kind == WAIT and step.exchange == 1:
            issued += arrived(machine, rank, call, chunk, stream)
        elif step.kind == GEMM and step.index == 0:
            issued.append((stream, machine.read("inbox", rank, chunk, call, last=False)))
        elif step.kind == GEMM:
            issued += [(stream, machine.write("results", each, chunk, rank, call)) for each in machine.ranks]
    # The inboxes may be read until the last GEMM of the call, which tells that it is done.
    parts = [*range(chunks), *([HEAD] if stored == SOME else [])]
    issued += [(stream, machine.read("inbox", rank, part, call, last=True)) for part in parts]
    issued += [(stream, each) for each in machine.tell(rank, "results") + machine.told(rank, "results")]
    # By the copy, or by a graph that goes on reading them until it ends.
    return issued + [(stream, machine.read("results", rank, chunk, call, last=True)) for chunk in range(chunks)]


def run(machine, queues, choose):
    """Run all queues (lists of operations) to their ends in an order that `choose(count)` picks; fails on a deadlock."""
    while any(queues):
        ready = [queue for queue in queues if queue]
        begin = choose(len(ready))
        for queue in ready[begin:] + ready[:begin]:
            if queue[0]():
                del queue[0]
                break
        else:
            raise AssertionError("deadlock: every stream waits")


def queues_of(machine, ranks, calls, connections):
    """One queue a stream and rank; with one connection all streams of a rank share one, in the host's order."""
    queues = []
    for rank in range(ranks):
        befores = [None, *(kind[1] for kind in calls)]
        issued = [each for call, kind in enumerate(calls) for each in call_of(machine, rank, call, befores[call], *kind)]
        streams = [(MAIN, OTHER, SENDING)] if connections == 1 else [(MAIN,), (OTHER,), (SENDING,)]
        queues += [[operation for stream, operation in issued if stream in names] for names in streams]
    return queues


CALLS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from((MAIN, OTHER)), st.sampled_from((ALL, SOME, NONE))), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(ranks=st.integers(2, 4), calls=CALLS, connections=st.sampled_from((1, 8)), data=st.data())
def test_no_order_of_events_deadlocks_or_overwrites(ranks, calls, connections, data):
    random = data.draw(st.randoms(use_true_random=False))
    machine = Machine(ranks)
    run(machine, queues_of(machine, ranks, calls, connections), random.randrange)
    assert not machine.reading and not any(machine.flags.values())


@pytest.mark.parametrize("late", range(3))
def test_a_rank_that_is_always_last(late):
    """Each rank in turn runs only when nobody else can."""
    machine = Machine(3)
    queues = queues_of(machine, 3, [(3, MAIN), (1, MAIN, NONE), (2, MAIN, SOME)], 8)
    own = queues[3 * late : 3 * late + 3]
    queues = [queue for queue in queues if not any(queue is each for each in own)] + own
    run(machine, queues, lambda count: 0)


def _breaks(change):
    """Whether some of a few hundred random orders fails once `change` has removed operations from the calls."""
    import random

    for seed in range(300):
        machine = Machine(2)
        queues = change(machine, queues_of(machine, 2, [(2, MAIN), (2, OTHER, SOME), (1, MAIN, NONE), (1, OTHER)], 8))
        try:
            run(machine, queues, random.Random(seed).randrange)
        except AssertionError:
            return True
    return False


def test_the_model_sees_what_the_rules_are_for(monkeypatch):
    assert not _breaks(lambda machine, queues: queues)
    with monkeypatch.context() as patch:  # calls on two streams, without `Room.follow`
        patch.setattr(Machine, "wait", lambda self, event: lambda: event[0] == "given" or event in self.events)
        assert _breaks(lambda machine, queues: queues)
    with monkeypatch.context() as patch:  # nobody waits before the results are copied
        patch.setattr(Machine, "told", lambda self, rank, channel: [])
        assert _breaks(lambda machine, queues: queues)
