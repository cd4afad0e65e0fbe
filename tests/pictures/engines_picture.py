"""Engines by hosts and devices, as a tree: what their classes say of themselves."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from drawing import Picture

from wtransfer.engines.factory import WeightTransferTrainerFactory
from wtransfer.engines.interface import KeepsVersions, Resends
from wtransfer.registry.resolve import registry

OURS = ("wtransfer", "wtransfer-nccl")
"""Distributions whose engines are shown, whichever others are installed."""
QUESTIONS = (
    ("is_multi_host", {False: ["one host", "only"], True: ["one or", "several hosts"]}),
    ("is_on_devices", {False: ["through", "host memory"], True: ["from GPU", "to GPU"]}),
)
"""Question to the class of an engine, and the answers."""
LEFT = (16, 178, 326, 474)
"""Left edges of the columns: the root, the answers to each question, the engines."""
NODE = (116, 48)
"""Width and height of an answer."""
LEAF = (340, 50)
"""Those of an engine."""


def engines() -> list[dict[str, Any]]:
    """Return the engines of these distributions, those that need least first.

    Raises:
        PackageNotFoundError: One of them is not installed.
    """
    found = []
    for each in OURS:
        metadata.distribution(each)
    for record in (each.record for each in registry("engines").listed()):
        if record.distribution in OURS:
            cls = registry("engines").get(record.name)
            trainer_cls = WeightTransferTrainerFactory.trainer_class(record.name)
            found.append(
                {
                    "name": record.name,
                    "distribution": record.distribution,
                    "devices": ", ".join(cls.devices),
                    "is_multi_host": cls.multi_host,
                    "is_on_devices": cls.devices != ("cpu",),
                    "resends": hasattr(trainer_cls, Resends.resend.__name__),
                    "keeps": hasattr(trainer_cls, KeepsVersions.kept.__name__),
                }
            )
    return sorted(found, key=lambda e: (e["is_multi_host"], e["is_on_devices"], e["name"]))


def lines_of(engine: dict[str, Any], *, with_devices: bool = True) -> tuple[str, str]:
    """Return the text of an engine's box."""
    devices = f", {engine['devices']}" if with_devices else ""
    where = "" if engine["distribution"] == OURS[0] else f" of `{engine['distribution']}`"
    late = "get the current version" if engine["resends"] else "wait for the next round"
    kept = ", keeps versions" if engine["keeps"] else ""
    return f"`{engine['name']}`{where}{devices}{kept}", f"late workers {late}"


def draw() -> Picture:
    """Return the picture."""
    found, step = engines(), LEAF[1] + 14
    texts = (f"{each['name']}: {' '.join(lines_of(each))}" for each in found)
    picture = Picture(step * len(found) + 26, "Engines by hosts and devices", "; ".join(texts))
    for number, each in enumerate(found):
        each["y"] = 20 + step * number + LEAF[1] / 2
    _split(picture, found, 0, ["workers", "on"])
    return picture


def _split(picture: Picture, found: list[dict[str, Any]], column: int, lines: list[str]) -> float:
    """Draw a node and all that is right of it; return the height of its middle."""
    question, answers = QUESTIONS[column] if column < len(QUESTIONS) else ("", {})
    parts = {answer: [e for e in found if e[question] is answer] for answer in answers}
    if parts and all(parts.values()):
        left = LEFT[column + 1]
        ends = [_split(picture, each, column + 1, answers[key]) for key, each in parts.items()]
    else:
        left = LEFT[-1]
        ends = [each["y"] for each in found]
        for each in found:
            # Where an answer before it has said them, without them.
            lines_of_box = lines_of(each, with_devices=column < len(QUESTIONS))
            picture.box(left, each["y"] - LEAF[1] / 2, *LEAF, *lines_of_box, kind="old")
    x, y = LEFT[column], sum(ends) / len(ends)
    picture.box(x, y - NODE[1] / 2, *NODE, *lines)
    for end in ends:
        picture.arrow((x + NODE[0], y), (left - 16, y), (left - 16, end), (left, end))
    return y
