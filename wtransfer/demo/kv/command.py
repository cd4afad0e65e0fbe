"""``wtransfer demo --kv``: read in one process, answer in another, and judge what was seen."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click
import msgspec
import torch

from wtransfer.demo.kv.conductor import KvConductor
from wtransfer.demo.kv.setting import KvSetting
from wtransfer.demo.kv.table import KvLines, KvTable
from wtransfer.demo.kv.verdict import judge
from wtransfer.demo.telling import fail, tell_checks, tell_end
from wtransfer.errors import WTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.demo.kv.story import KvStory
    from wtransfer.demo.verdict import Check

DEFAULTS = KvSetting()
"""What the story is about where nothing else is said."""


def tell_kv(connector: str, options: Sequence[str], *, as_json: bool) -> int:
    """Tell the story.

    Args:
        connector: What brings the KV cache.
        options: Of the connector: ``key=value``, each; a value is JSON, or else a text.
        as_json: Whether one JSON document is all that is wanted.

    Returns:
        The exit status.
    """
    setting = dataclasses.replace(
        DEFAULTS, connector=connector, options=dict(map(_option, options))
    )
    try:
        story, seconds = _run(setting, as_json=as_json)
    except WTransferError as error:
        fail(error, as_json=as_json)
    checks = judge(story, setting.num_shared)
    if as_json:
        click.echo(json.dumps(_document(setting, story, checks, seconds), indent=2))
    else:
        tell_checks(checks)
        tell_end(checks, seconds)
    return 0 if all(check.kept for check in checks) else 1


def _option(pair: str) -> tuple[str, Any]:
    name, equals, text = pair.partition("=")
    if not equals:
        raise click.UsageError(f"-o {pair}: options are key=value")
    try:
        return name, msgspec.json.decode(text)
    except msgspec.DecodeError:
        return name, text


def _run(setting: KvSetting, *, as_json: bool) -> tuple[KvStory, float]:
    # A plain copy is measured here, on one thread as the instances copy.
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        view = None if as_json else _view()
        if view is not None:
            stack.enter_context(view)
        conductor = stack.enter_context(KvConductor(setting, view))
        conductor.start()
        began = time.monotonic()
        return conductor.run(), time.monotonic() - began


def _view() -> KvTable | KvLines:
    if not sys.stdout.isatty():
        return KvLines(click.echo)
    from rich.console import Console

    return KvTable(Console())


def _document(
    setting: KvSetting, story: KvStory, checks: Sequence[Check], seconds: float
) -> dict[str, Any]:
    return {
        "ok": all(check.kept for check in checks),
        "seconds": seconds,
        "connector": setting.connector,
        "prompts": [
            dataclasses.asdict(row)
            | {
                "num_recomputed": row.num_recomputed,
                "memcpy_share": row.memcpy_share,
                "same": row.is_same,
            }
            for row in story.rows
        ],
        "events": story.events,
        "checks": [dataclasses.asdict(check) for check in checks],
    }
