"""The mailbox against a list: first come, first served among those that fit; nothing lost, nothing
twice.
"""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from ashl.runtime.effects import ANY, Message, PeerFailedError, Recv
from ashl.runtime.kernel import Mailbox

TAGS = [("a", 0, 0), ("a", 0, 1), ("b", 0, 0)]
one_tag = st.sampled_from(TAGS)
some_tags = st.lists(one_tag, min_size=1, max_size=2, unique=True).map(tuple)
sources = st.integers(0, 2)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), one_tag, sources),
        st.tuples(st.just("receive"), some_tags, st.one_of(st.just(ANY), sources)),
        st.tuples(st.just("drop"), some_tags, st.none()),
    ),
    max_size=60,
)


def matches(recv: Recv, message: Message) -> bool:
    return message.tag in recv.tags and recv.src in (ANY, message.src)


def waiter(recv: Recv) -> SimpleNamespace:
    return SimpleNamespace(waiting=recv)


@given(steps)
def test_like_a_list(steps) -> None:
    box = Mailbox()
    kept: list[Message] = []  # the model: in order of arrival
    waiting: list[SimpleNamespace] = []
    dropped: set = set()
    for number, (what, tag, src) in enumerate(steps):
        if what == "put":
            message = Message(src, tag, None, (float(number),), 0)
            woken = box.put(message)
            first = next((task for task in waiting if matches(task.waiting, message)), None)
            assert woken is first, "whoever waits longest gets it"
            if first:
                waiting.remove(first)
            elif tag not in dropped:
                kept.append(message)
        elif what == "receive":
            recv = Recv(tag, src)
            got = box.receive(recv)
            fitting = [message for message in kept if matches(recv, message)]
            assert (got is None) == (not fitting)
            if got is None:
                task = waiter(recv)
                waiting.append(task)
                box.waiters.append(task)  # as both kernels do
            else:
                assert got == fitting[0], "in order of arrival, whatever the order of the tags"
                kept.remove(got)
        else:
            box.discard(tag)
            dropped.update(tag)
            kept = [message for message in kept if message.tag not in dropped]
    assert box.undelivered_messages() == kept
    assert all(box.messages.values()), "no empty queues are left"
    assert box.waiters == waiting


@given(st.lists(st.tuples(some_tags, st.one_of(st.just(ANY), sources)), max_size=8), sources)
def test_a_failed_peer_ends_hopeless_operations(receives, gone) -> None:
    box, loss = Mailbox(), PeerFailedError(gone)
    tasks = [waiter(Recv(tags, src)) for tags, src in receives]
    box.waiters.extend(tasks)
    stuck = [task for task, _ in box.mark_failed(loss, 0)]
    assert stuck == [task for task in tasks if task.waiting.src in (ANY, gone)]
    assert box.waiters == [task for task in tasks if task not in stuck]
    assert box.receive(Recv((TAGS[0],), gone)) is loss
    assert box.receive(Recv((TAGS[0],), gone + 1)) is None


def test_what_came_before_the_loss_is_still_delivered() -> None:
    box = Mailbox()
    message = Message(1, TAGS[0], None, (), 0)
    box.put(message)
    box.mark_failed(PeerFailedError(1), 0)
    assert box.receive(Recv((TAGS[0],), 1)) is message
    assert isinstance(box.receive(Recv((TAGS[0],), 1)), PeerFailedError)
