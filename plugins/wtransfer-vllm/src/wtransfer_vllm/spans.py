"""Spans of an answer: the weights that computed each of its tokens.

vLLM reports spans of an answer's tokens, each with a text that names its weights. Under an engine
of wtransfer the text is a tag: the label of the weights, and their fingerprint.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_TAG = re.compile("(.*)@([0-9a-f]{32})", re.DOTALL)


class Span(NamedTuple):
    """Output tokens ``[start, end)`` of an answer, all of one version."""

    start: int
    """Index of the first token, 0-based."""
    end: int
    """Index after the last token."""
    version: str
    """Label of the weights; ``empty``: the model belonged to no version."""
    fingerprint: str | None
    """Identity of the weights, as in a publisher's report; None before the first commit."""


def tag_of(version: str, fingerprint: str | None) -> str:
    """Return the text that names weights in vLLM's spans."""
    return version if fingerprint is None else f"{version}@{fingerprint}"


def spans(weight_versions: Iterable[Any] | None) -> list[Span]:
    """Return the spans of an answer, in order; a request that met no commit has one.

    Args:
        weight_versions: ``weight_versions`` of vLLM's ``CompletionOutput``, or of a choice in the
            answer of its route ``/inference/v1/generate``. vLLM gives it with the last token.

    Raises:
        ValueError: vLLM has given none: the request has not ended, or its release has
            no spans.
    """
    if weight_versions is None:
        raise ValueError(
            "vLLM gives no spans with this output; release 0.32 gives them when a request has ended"
        )
    found = []
    for each in weight_versions:
        fields = each if isinstance(each, dict) else vars(each)
        parts = _TAG.fullmatch(fields["version"])
        version, fingerprint = parts.groups() if parts else (fields["version"], None)
        found.append(Span(fields["start"], fields["end"], version, fingerprint))
    return found
