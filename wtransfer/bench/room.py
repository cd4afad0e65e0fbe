"""Whether there is memory for what is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.bench.nbytes import in_words
from wtransfer.bench.settings import MOST_WATCHED_NBYTES
from wtransfer.errors import StagingMemoryError
from wtransfer.transport.memory import available_memory

if TYPE_CHECKING:
    from wtransfer.bench.settings import Settings

# Processes, messages and file cache beside the weights.
_BESIDE_NBYTES = 1 << 30
# The trainer's weights and two segments.
_NUM_OF_TRAINER = 3


def needed_nbytes(settings: Settings) -> int:
    """Return the memory that the largest scene takes.

    Workers that adopt have none of their own, as theirs is never written to. Those that copy, or
    are broadcast to, have one; and until a commit is settled, the one before it.
    """
    own = 2 if "copy" in settings.commits else 1
    small_nbytes = settings.num_small * settings.small_nbytes
    rounds = _NUM_OF_TRAINER + own * settings.base_workers
    watched = _NUM_OF_TRAINER + own * max(settings.workers)
    return _BESIDE_NBYTES + max(
        rounds * max(settings.nbytes, small_nbytes),
        watched * min(settings.nbytes, MOST_WATCHED_NBYTES),
    )


def require_room(settings: Settings) -> None:
    """See to it that the run fits.

    Raises:
        StagingMemoryError: It does not; with both numbers.
    """
    needed, available = needed_nbytes(settings), available_memory()
    if needed > available:
        raise StagingMemoryError(
            f"this run needs {in_words(needed)} of memory, {in_words(available)} are available; "
            f"free memory, or ask for less than --nbytes {in_words(settings.nbytes)}"
        )
