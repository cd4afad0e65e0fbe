"""Spans of an answer: the weights that computed each of its tokens.

vLLM reports spans of an answer's tokens, each with a text that names its weights. Under an engine
of wtransfer the text is a tag: the label of the weights, their fingerprint, and `ON_OLDER_KV` where
the tokens rest on KV of before the last commit.

vLLM's engine core gives one text to all outputs of a batch. Where some of its requests rest on
older KV the text lists them, and the front end takes each request's tag from it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ON_OLDER_KV = "+older-kv"
"""End of the tag of tokens that were computed over KV of before the last commit."""
_TAG = re.compile(rf"(.*?)(?:@([0-9a-f]{{32}}))?({re.escape(ON_OLDER_KV)})?", re.DOTALL)
# Callers choose ids. A mark within an id begins no list of whole strings: from there to the end of
# the text an odd number of quotes is not escaped.
_ID = r'"(?:[^"\\]|\\.)*"'
_BATCH = re.compile(rf"(.*){re.escape(ON_OLDER_KV)}(\[{_ID}(?:, {_ID})*\])", re.DOTALL)


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
    on_older_kv: bool = False
    """True if these weights computed the tokens over KV of before the last commit, which the
    request kept: no weights by themselves give these tokens."""


def tag_of(version: str, fingerprint: str | None) -> str:
    """Return the text that names weights in vLLM's spans."""
    return version if fingerprint is None else f"{version}@{fingerprint}"


def tag_of_batch(tag: str, on_older_kv: Sequence[str]) -> str:
    """Return the text for all outputs of a batch.

    Args:
        tag: Tag of the weights that computed it.
        on_older_kv: Ids of those requests in it that rest on older KV.
    """
    return f"{tag}{ON_OLDER_KV}{json.dumps(on_older_kv)}" if on_older_kv else tag


def tag_in_batch(text: str, request_id: str) -> str:
    """Return the tag of one request's tokens, by the text for all outputs of their batch."""
    tag, on_older_kv = _read_batch(text)
    return tag + ON_OLDER_KV if request_id in on_older_kv else tag


@functools.lru_cache(maxsize=4)
def _read_batch(text: str) -> tuple[str, frozenset[str]]:
    """Return the tag in a text, read once for all requests of the batch, and the ids."""
    parts = _BATCH.fullmatch(text)
    if parts:
        # An error here would end vLLM's server; a label may be any text.
        with contextlib.suppress(ValueError):
            return parts[1], frozenset(json.loads(parts[2]))
    return text, frozenset()


def follow_requests(request_state: type[Any]) -> None:
    """Have vLLM's front end give each request its own tag; idempotent.

    Args:
        request_state: vLLM's ``RequestState``, which is told the text of each batch.
    """
    track = getattr(request_state, "track_weight_version", None)
    if track is None or hasattr(track, "wtransfer_call"):  # an older release has no spans
        return

    @functools.wraps(track)
    def track_weight_version(self: Any, weight_version: str) -> None:
        track(self, tag_in_batch(weight_version, self.request_id))

    track_weight_version.wtransfer_call = track  # type: ignore[attr-defined]  # the mark
    request_state.track_weight_version = track_weight_version


def spans(weight_versions: Iterable[Any] | None) -> list[Span]:
    """Return the spans of an answer, in order; a request that met no commit has one.

    Args:
        weight_versions: ``weight_versions`` of vLLM's ``CompletionOutput``, or of a choice in the
            answer of its route ``/inference/v1/generate``. vLLM gives it with the last token.

    Raises:
        ValueError: vLLM has given none: the request has not ended, or its release has
            no spans. Or a front end without wtransfer-vllm has given the text of a batch.
    """
    if weight_versions is None:
        raise ValueError(
            "vLLM gives no spans with this output; release 0.32 gives them when a request has ended"
        )
    found = []
    for each in weight_versions:
        fields = each if isinstance(each, dict) else vars(each)
        if _read_batch(fields["version"])[1]:
            raise ValueError(
                "a span has the text of a whole batch: the front end has no wtransfer-vllm; "
                "install it there, too"
            )
        parts = _TAG.fullmatch(fields["version"])
        assert parts  # any text is a label
        found.append(Span(fields["start"], fields["end"], parts[1], parts[2], bool(parts[3])))
    return found
