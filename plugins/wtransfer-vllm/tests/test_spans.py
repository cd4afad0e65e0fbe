"""Spans of answers, as vLLM's objects and as its route's JSON."""

import types

import pytest

from wtransfer_vllm.spans import (
    ON_OLDER_KV,
    Span,
    follow_requests,
    spans,
    tag_in_batch,
    tag_of,
    tag_of_batch,
)

ONE, OTHER = "1" * 32, "2" * 32


def in_vllm(version, start, end):
    return types.SimpleNamespace(version=version, start=start, end=end)


@pytest.mark.parametrize("form", [in_vllm, lambda *each: vars(in_vllm(*each))], ids=["own", "json"])
@pytest.mark.parametrize(
    "label", ["step", "me@home", "two\nlines", "", f"step@{OTHER}", f"step{ON_OLDER_KV}", "a@"]
)
def test_label_and_fingerprint_of_each_span_are_found(form, label):
    given = [
        form("default", 0, 4),
        form(tag_of(label, ONE), 4, 5),
        form(tag_of(label, OTHER) + ON_OLDER_KV, 5, 9),
        form("empty" + ON_OLDER_KV, 9, 10),
    ]
    assert spans(given) == [
        Span(0, 4, "default", None),
        Span(4, 5, label, ONE),
        Span(5, 9, label, OTHER, on_older_kv=True),
        Span(9, 10, "empty", None, on_older_kv=True),
    ]


@pytest.mark.parametrize(
    "ids",
    [
        ["a"],
        ['"', "]", "a\0b", "ü", "\\", "\\+"],
        ['chatcmpl-+older-kv["y"]-0a1b2c3d'],
        ["first", '+older-kv["', "+older-kv[]"],
        ["+older-kv[", ", ", "+older-kv[", "]"],
        [str(n) for n in range(500)],
    ],
    ids=["one", "signs", "like a text", "like parts of a text", "like its list", "500"],
)
@pytest.mark.parametrize("tag", [tag_of("step", ONE), "empty", f"two\nlines{ON_OLDER_KV}"])
def test_request_of_a_batch_is_told_from_those_on_older_kv(tag, ids):
    text = tag_of_batch(tag, ids)
    assert [tag_in_batch(text, each) for each in ids] == [tag + ON_OLDER_KV] * len(ids)
    assert tag_in_batch(text, "another") == tag
    assert tag_in_batch(tag_of_batch(tag, []), ids[0]) == tag


@pytest.mark.parametrize(
    "ids", ["[b]", "[]", "[", "[1]", "[[]]", "[" * 5000 + "]" * 5000, r'["\q"]', '["a\n"]']
)
def test_label_that_only_looks_like_the_text_of_a_batch_is_a_label(ids):
    label = f"a{ON_OLDER_KV}{ids}"
    assert tag_in_batch(tag_of(label, None), "b") == label
    assert tag_in_batch(tag_of_batch(label, ["b"]), "b") == label + ON_OLDER_KV
    assert spans([in_vllm(label, 0, 4)]) == [Span(0, 4, label, None)]


def test_text_of_a_batch_is_an_error_that_says_what_the_front_end_lacks():
    given = [in_vllm(tag_of_batch(tag_of("step", ONE), ["kept"]), 0, 4)]
    with pytest.raises(ValueError, match="front end has no wtransfer-vllm"):
        spans(given)


def test_front_end_gives_each_request_its_own_tag_however_often_it_is_led():
    class State:
        request_id, told = "kept", ()

        def track_weight_version(self, weight_version):
            self.told += (weight_version,)

    follow_requests(State)
    follow_requests(State)
    state = State()
    for ids in ([], ["kept"], ["other"]):
        state.track_weight_version(tag_of_batch("step", ids))
    assert state.told == ("step", "step" + ON_OLDER_KV, "step")


def test_release_without_spans_is_left_as_it_is():
    follow_requests(state := type("State", (), {}))
    assert not hasattr(state, "track_weight_version")


def test_output_without_spans_is_an_error_that_says_when_there_are_some():
    with pytest.raises(ValueError, match="when a request has ended"):
        spans(None)
