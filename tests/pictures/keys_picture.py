"""Where the key of a block of KV cache comes from: each part is changed, and seen in the key."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from drawing import LINE_HEIGHT, WIDTH, Picture

from wtransfer.connectors.naming import BlockNaming, request_root
from wtransfer.connectors.serving_config import Instance
from wtransfer.kv.keys import FENCE_NBYTES, GROUP_NBYTES, fence_key, make_offload_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

INSTANCE = Instance("e", "m", "bfloat16", 16, 0, 1, sends=True, receives=True)
POSITION = SimpleNamespace(offset=0)
OF_REQUEST: dict[str, dict[str, Any]] = {
    "`cache_salt`": {"cache_salt": "tenant"},
    "`mm_features`": {"mm_features": [SimpleNamespace(identifier="i", mm_position=POSITION)]},
    "`lora_request`": {"lora_request": "adapter"},
    "`prompt_embeds`": {"prompt_embeds": "embeds"},
    "`resumable`": {"resumable": True},
    "media without identifier": {
        "mm_features": [SimpleNamespace(identifier=None, mm_position=POSITION)]
    },
    "a salt that is no text": {"cache_salt": "\ud800"},
}
"""In words -> attributes of a request, with other values than by default."""
BLOCK_SIZE, NUM_BLOCKS = INSTANCE.block_size, 3
TOKENS = range(BLOCK_SIZE * NUM_BLOCKS)
LAST = NUM_BLOCKS - 1


def keys(
    instance: Instance = INSTANCE,
    fingerprint: str = "f",
    group: int = 0,
    tokens: Sequence[int] = TOKENS,
    **of_request: Any,
) -> list[Any]:
    """Return the keys of a request's blocks."""
    request = SimpleNamespace(all_token_ids=tokens, **of_request)
    return BlockNaming(BLOCK_SIZE, instance.root).of(request).under(fingerprint, group=group)


def parts_of_instance() -> list[str]:
    """Return the fields of an instance that are in its keys."""

    def other(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(each + 1 for each in value)
        return f"{value}x" if isinstance(value, str) else (value or 0) + 1

    changed = {
        each.name: keys(replace(INSTANCE, **{each.name: other(getattr(INSTANCE, each.name))}))
        for each in fields(Instance)
    }
    return [name for name, found in changed.items() if found != keys()]


def signature(function: Callable[..., Any]) -> tuple[str, str]:
    """Return a function's name and its arguments, as two lines of code."""
    return f"`{function.__name__}`", f"`({', '.join(inspect.signature(function).parameters)})`"


def draw() -> Picture:
    """Return the picture."""
    found = {name: keys(**attributes) for name, attributes in OF_REQUEST.items()}
    uncacheable = [name for name, others in found.items() if not others]
    within = [name for name, others in found.items() if others and others != keys()]
    assert len(uncacheable) + len(within) == len(OF_REQUEST)
    nbytes = check_parts()
    instance = parts_of_instance()
    picture = Picture(
        498,
        "Where the key of a block of KV cache comes from",
        f"A root is made of the instance ({', '.join(instance)}) and the request "
        f"({', '.join(within)}). Each block is hashed with its tokens and the hash before it. The "
        "key is a digest of the fingerprint of the weights and a second hash, then the hash, then "
        f"the number of the group. A request with {', '.join(uncacheable)} has no keys.",
    )
    half = (len(instance) + 1) // 2
    lines = [", ".join(f"`{each}`" for each in part) for part in (instance[:half], instance[half:])]
    picture.box(16, 16, 366, 66, f"`{Instance.__name__}.root`", *lines)
    picture.box(16, 96, 366, 48, "request", ", ".join(within))
    picture.box(430, 56, 150, 48, f"`{request_root.__name__}`", "root")
    for y in (49, 120):
        picture.arrow((382, y), (406, y), (406, 80), (430, 80))
    height = LINE_HEIGHT * (1 + len(uncacheable)) + 12
    none = "no key if a request has"
    picture.box(634, 80 - height / 2, 180, height, none, *uncacheable, kind="bad")
    picture.arrow((580, 80), (634, 80))
    make, fence = signature(make_offload_key), signature(fence_key)
    arguments = [each.strip("`()").split(", ") for _, each in (make, fence)]
    hashes = arguments[0][0], arguments[1][2]
    chain(picture, hashes)
    picture.arrow((505, 104), (505, 164), (104, 164), (104, 246), (168, 246))
    picture.box(16, 350, 236, 48, *make, kind="work")
    picture.box(330, 350, 270, 48, *fence, kind="work")
    picture.box(664, 350, 150, 48, "`fingerprint`", "of the weights", kind="new")
    picture.arrow((252, 374), (330, 374))
    picture.arrow((664, 374), (600, 374))
    for x, y, end, name in ((672, 306, 134, hashes[0]), (728, 328, 465, hashes[1])):
        picture.arrow((x, 272), (x, y), (end, y), (end, 350))
        picture.text(end + 6, y + 16, f"`{name}`")
    picture.arrow((465, 398), (465, 432))
    parts = (
        (320, "new", f"{nbytes[0]} bytes", f"`{arguments[1][1]}`, `{hashes[1]}`"),
        (320, "old", f"{nbytes[1]} bytes, by the default hash", f"`{hashes[0]}`"),
        (WIDTH - 32 - 640, "plain", f"{nbytes[2]} bytes", f"`{arguments[0][1]}`"),
    )
    x = 16
    for width, kind, *lines in parts:
        picture.box(x, 432, width, 48, *lines, kind=kind)
        x += width
    return picture


def chain(picture: Picture, hashes: tuple[str, str]) -> None:
    """Draw the hashes of the blocks, each over the one before it."""
    for number in range(NUM_BLOCKS):
        x = 168 + 230 * number
        picture.box(x, 176, 170, 30, f"tokens of block {number}")
        picture.box(x, 222, 170, 50, *(f"`{each}`" for each in hashes), kind="old")
        picture.arrow((x + 85, 206), (x + 85, 222))
        if number:
            picture.arrow((x - 60, 246), (x, 246))


def check_parts() -> tuple[int, int, int]:
    """Return the bytes of the parts of a key, and fail unless it has what the picture says."""
    key = keys()[LAST]
    hashed = slice(FENCE_NBYTES, len(key) - GROUP_NBYTES)
    # Of all tokens up to the block's end, and of none after it.
    assert keys(tokens=[99, *TOKENS[1:]])[LAST][hashed] != key[hashed]
    assert keys(tokens=[*TOKENS[:-1], 99])[LAST][hashed] != key[hashed]
    assert keys(tokens=[*TOKENS[:-1], 99])[0] == keys()[0]
    # Not of the weights; these are in the mark alone.
    weights = keys(fingerprint="g")[LAST]
    assert weights[FENCE_NBYTES:] == key[FENCE_NBYTES:]
    assert weights[:FENCE_NBYTES] != key[:FENCE_NBYTES]
    group = keys(group=1)[LAST]
    assert group[:-GROUP_NBYTES] == key[:-GROUP_NBYTES]
    assert group[-GROUP_NBYTES:] != key[-GROUP_NBYTES:]
    own = make_offload_key(key[hashed])
    assert fence_key(own, "f", b"another")[FENCE_NBYTES:] == key[FENCE_NBYTES:]
    return FENCE_NBYTES, len(key[hashed]), GROUP_NBYTES
