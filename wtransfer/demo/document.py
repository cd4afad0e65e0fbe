"""The whole run as plain data, for ``--json``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from wtransfer.demo.row import usual_gap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.demo.story import Story
    from wtransfer.demo.verdict import Check


def document(story: Story, checks: Sequence[Check], seconds: float) -> dict[str, Any]:
    """Return everything that the demo knows at its end.

    Args:
        story: The run.
        checks: Its verdict.
        seconds: Duration after imports.
    """
    return {
        "ok": all(check.kept for check in checks),
        "seconds": seconds,
        "parameters": story.listening.num_parameters if story.listening else None,
        "first_loss": story.first_loss,
        "last_loss": story.trained.loss if story.trained else None,
        "usual_gap_s": usual_gap(story),
        "rounds": [
            asdict(row) | {"error": over.error, "blamed": over.blamed, "failed_in": over.failed_in}
            for row, over in zip(story.rows, story.rounds, strict=True)
        ],
        "killed": asdict(story.kill) if story.kill else None,
        "events": story.events,
        "checks": [asdict(check) for check in checks],
        "samples": [
            {"worker": each.worker, "version": each.version, "text": each.text}
            for each in story.samples
        ],
    }
