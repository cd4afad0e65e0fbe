"""Draw the pictures of the guides anew: ``python tests/pictures/draw_all.py``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import engines_picture
import keys_picture
import round_picture
import states_picture

if TYPE_CHECKING:
    from collections.abc import Callable

    from drawing import Picture

ROOT = Path(__file__).parents[2]
PICTURES: dict[str, Callable[[], Picture]] = {
    "wtransfer/engines/round.svg": round_picture.draw,
    "wtransfer/engines/engines.svg": engines_picture.draw,
    "wtransfer/engines/states.svg": states_picture.draw,
    "wtransfer/connectors/keys.svg": keys_picture.draw,
}
"""File of each picture, beside the guide that shows it -> its script."""

if __name__ == "__main__":
    # Commits fail on purpose.
    logging.disable()
    for name, draw in PICTURES.items():
        (ROOT / name).write_text(str(draw()), "utf-8")
