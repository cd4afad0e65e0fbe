"""Orders are carried out once, in every rank, whatever broadcasts are skipped or repeated."""

from wtransfer_sglang.orders import Commit, Join, Name, OrderBook


def test_order_goes_along_until_it_has_come_back():
    book = OrderBook()
    book.give(Join, "unix:@p", "secret", None)
    book.give(Commit)
    sent = book.waiting()
    assert [type(order) for order in sent] == [Join, Commit]
    assert book.waiting() == sent, "the broadcast was skipped"
    assert all(book.take(order) for order in sent)
    assert book.waiting() == []
    assert not book.has(Commit)


def test_order_that_arrives_again_is_dropped():
    first, other = OrderBook(), OrderBook()
    first.give(Name, "1" * 32)
    (order,) = first.waiting()
    assert [other.take(order), other.take(order)] == [True, False]
    assert first.take(order)
    first.give(Commit)
    (commit,) = first.waiting()
    assert other.take(commit)


def test_secret_of_a_publisher_is_in_no_log():
    assert "secret" not in repr(Join(1, "unix:@p", "secret"))
