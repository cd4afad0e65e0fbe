"""Spans of answers, as vLLM's objects and as its route's JSON."""

import types

import pytest

from wtransfer_vllm.spans import Span, spans, tag_of

ONE, OTHER = "1" * 32, "2" * 32


def in_vllm(version, start, end):
    return types.SimpleNamespace(version=version, start=start, end=end)


@pytest.mark.parametrize("form", [in_vllm, lambda *each: vars(in_vllm(*each))], ids=["own", "json"])
@pytest.mark.parametrize("label", ["step", "me@home", "two\nlines", "", f"step@{OTHER}"])
def test_label_and_fingerprint_of_each_span_are_found(form, label):
    given = [
        form("default", 0, 4),
        form(tag_of(label, ONE), 4, 5),
        form(tag_of(label, OTHER), 5, 9),
    ]
    assert spans(given) == [
        Span(0, 4, "default", None),
        Span(4, 5, label, ONE),
        Span(5, 9, label, OTHER),
    ]


def test_output_without_spans_is_an_error_that_says_when_there_are_some():
    with pytest.raises(ValueError, match="when a request has ended"):
        spans(None)
