"""What was run with which vLLM: kept in releases.json, shown as a table in README.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
RELEASES = HERE / "releases.json"
README = HERE.parent / "README.md"
KINDS = ("weights", "connectors", "specs")
PLACE = re.compile(r"(?<=<!-- releases -->\n).*?(?=<!-- end -->)", re.DOTALL)


def enter(kinds, *, release, how):
    """Enter that a release was run with some kinds of backend, and write the table anew."""
    releases = json.loads(RELEASES.read_text())
    cells = releases.setdefault(release, {})
    cells |= dict.fromkeys(kinds, how)
    RELEASES.write_text(json.dumps(releases, indent=2, sort_keys=True) + "\n")
    README.write_text(PLACE.sub(made_of(releases), README.read_text()))


def made_of(releases):
    """Return the table."""
    lines = [f"| vLLM | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"]
    for release in sorted(releases, key=lambda each: [int(part) for part in each.split(".")]):
        cells = [releases[release].get(kind, "not run") for kind in KINDS]
        lines.append(f"| {release} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
