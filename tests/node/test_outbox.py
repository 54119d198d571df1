import pytest
from reporter_kit import NAMESPACE, SaidNode, hexes

from kvstrata import api
from kvstrata.errors import Busy, Malformed
from kvstrata.node.outbox import Outbox

DOCUMENT = NAMESPACE.document.decode()


def outbox(node: SaidNode, **bounds: int) -> Outbox:
    """Registered, and past the snapshot that begins every incarnation."""
    made = Outbox(node, **bounds)
    made.registered(0)
    while (report := made.next("i1")) is not None:
        made.answered(api.ReportReply(applied=True, next_seq=report.seq + 1))
    return made


def sent(made: Outbox) -> api.Report | None:
    made.collect()
    return made.next("i1")


def applied(made: Outbox) -> None:
    made.answered(api.ReportReply(applied=True, next_seq=made.next_seq + 1))


def test_it_begins_with_a_snapshot_even_of_nothing():
    made = Outbox(SaidNode())
    made.registered(0)
    report = made.next("i1")
    assert (report.seq, report.snapshot, report.changes) == (0, "only", [])
    applied(made)
    assert made.next("i1") is None


def test_changes_are_coalesced_to_one_word_per_key():
    node = SaidNode(stores=("s",))
    made = outbox(node)
    node.gain("host", 1, 2)
    made.collect()
    node.lose("host", 1)
    node.gain("s", 1)
    report = sent(made)
    assert (report.seq, report.snapshot) == (1, "no")
    assert report.changes == [
        api.Change(location="host", added=hexes(2), removed=hexes(1)),
        api.Change(location="s", added=hexes(1)),
    ]
    applied(made)
    assert sent(made) is None


def test_an_unanswered_batch_is_sent_again_as_it_was():
    node = SaidNode()
    made = outbox(node)
    node.gain("host", 1)
    first = sent(made)
    node.lose("host", 1)
    assert sent(made) == first
    # It had arrived; only the answer was lost.
    made.answered(api.ReportReply(applied=False, next_seq=2))
    second = sent(made)
    assert (second.seq, second.changes) == (2, [api.Change(location="host", removed=hexes(1))])


def test_documents_go_with_the_first_keys_that_need_them():
    node = SaidNode()
    made = outbox(node)
    node.gain("host", 1)
    assert sent(made).namespaces == [DOCUMENT]
    applied(made)
    node.gain("host", 2)
    assert sent(made).namespaces == []
    made.registered(made.next_seq)  # a server that lost everything else may have lost these
    applied(made)
    node.gain("host", 3)
    assert sent(made).namespaces == [DOCUMENT]


def test_snapshots_come_in_parts():
    node = SaidNode(stores=("s",))
    made = outbox(node, batch_keys=2)
    node.gain("host", 1, 2, 3)
    node.gain("s", 4, 5)
    made.want_snapshot()
    parts = []
    while (report := sent(made)) is not None:
        parts.append((report.seq, report.snapshot, [len(c.added) for c in report.changes]))
        node.gain("host", 9)  # what happens meanwhile comes after it
        applied(made)
        if len(parts) == 4:
            break
    assert parts == [
        (1, "first", [2]),
        (2, "more", [1, 1]),
        (3, "last", [1]),
        (4, "no", [1]),
    ]


def test_a_snapshot_that_fails_begins_again():
    node = SaidNode()
    made = outbox(node, batch_keys=1)
    node.gain("host", 1, 2)
    made.want_snapshot()
    assert sent(made).snapshot == "first"
    applied(made)
    assert sent(made).snapshot == "last"
    made.answered(api.ReportReply(applied=False, next_seq=2, snapshot_wanted=True))
    again = sent(made)
    assert (again.snapshot, again.seq) == ("first", 2)


def test_more_pending_than_a_snapshot_becomes_one():
    node = SaidNode()
    made = outbox(node, pending_keys=3)
    for number in range(10):
        node.gain("host", number)
        made.collect()
    report = sent(made)
    assert (report.snapshot, len(report.changes[0].added)) == ("only", 10)


@pytest.mark.parametrize(("server", "seq"), [(0, 1), (5, 5)], ids=["behind", "ahead"])
def test_numbers_that_differ_are_made_up_for_by_a_snapshot(server, seq):
    node = SaidNode()
    made = outbox(node)
    node.gain("host", 1)
    made.registered(server)
    report = sent(made)
    assert (report.snapshot, report.seq) == ("only", seq)


def test_refusals():
    node = SaidNode()
    made = outbox(node)
    node.gain("host", 1)
    first = sent(made)
    made.refused(Busy("later"))
    assert sent(made) == first
    made.refused(Malformed("what?"))
    assert sent(made).snapshot == "only"


def test_what_was_collected_before_a_mark_is_reported_when_all_its_batches_are():
    node = SaidNode()
    made = outbox(node, batch_keys=2)
    assert made.has_reported(made.mark())
    node.gain("host", 1, 2, 3)
    made.collect()
    mark = made.mark()
    assert made.next("i1") is not None
    node.gain("host", 4)
    for _ in range(2):
        assert sent(made) is not None
        assert not made.has_reported(mark)
        applied(made)
    assert sent(made).changes == [api.Change(location="host", added=hexes(4))]
    assert made.has_reported(mark)
    later = made.mark()
    assert not made.has_reported(later)
    applied(made)
    assert sent(made) is None
    assert made.has_reported(later)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_snapshot_has_what_was_collected_before_it(when):
    node = SaidNode()
    made = outbox(node, batch_keys=2)
    node.gain("host", 1, 2, 3)
    made.collect()
    if when == "before":
        mark = made.mark()
        assert sent(made) is not None
    made.answered(api.ReportReply(applied=False, next_seq=9, snapshot_wanted=True))
    if when == "after":
        mark = made.mark()
    for part in ("first", "last"):
        assert sent(made).snapshot == part
        assert not made.has_reported(mark)
        applied(made)
    assert sent(made) is None
    assert made.has_reported(mark)
