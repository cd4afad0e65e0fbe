"""A router before a prefill and a decode instance, as users of such a pair have one."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.errors import PeerError, StallError

if TYPE_CHECKING:
    from wtransfer.testing.mini_engine.instance import Instance
    from wtransfer.testing.mini_engine.instance_messages import Answer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Handed:
    """What came of a prompt in the prefill instance."""

    answer: Answer | None
    """Of the instance; None: there is none."""
    why: str | None = None
    """Why the decode instance has to do without it."""


@dataclass(frozen=True)
class Routed:
    """What came of a prompt."""

    answer: Answer
    """Of the decode instance."""
    handed: Handed
    """Of the prefill instance."""


class Router:
    """Has one instance compute the prompt, and another one go on with it.

    The first generates a single token and is told ``do_remote_decode``; what it returns as
    ``kv_transfer_params`` goes to the second one with the same prompt. If the first is lost or
    late, the second one is asked alone: it computes the prompt itself, and the tokens are the same.

    Args:
        prefill: Computes prompts; another may take its place at any time. None: there is none.
        decode: Generates.
        prefill_deadline_s: How long a prompt may take there.
    """

    def __init__(
        self, prefill: Instance | None, decode: Instance, prefill_deadline_s: float = 30.0
    ) -> None:
        self.prefill = prefill
        """Computes prompts."""
        self.decode = decode
        """Generates."""
        self._prefill_deadline_s = prefill_deadline_s

    def ask(self, prompt: list[int], max_new_tokens: int, deadline_s: float = 60.0) -> Routed:
        """Return what follows a prompt.

        Args:
            prompt: Its tokens.
            max_new_tokens: How many are generated.
            deadline_s: How long that may take in the decode instance.

        Raises:
            ValueError: It is refused.
            PeerLostError: The decode instance is lost.
            StallError: It did not answer in time.
        """
        handed = self.hand_over(prompt)
        return self.go_on(prompt, max_new_tokens, handed, deadline_s)

    def go_on(
        self, prompt: list[int], max_new_tokens: int, handed: Handed, deadline_s: float = 60.0
    ) -> Routed:
        """Let the decode instance go on with what `hand_over` returned; raises as `ask`."""
        # What a request says that did not come to its end may be there in part, or soon be gone.
        params = handed.answer.kv_transfer_params if handed.answer and not handed.why else None
        answer = self.decode.ask(prompt, max_new_tokens, params, deadline_s)
        return Routed(answer, handed)

    def hand_over(self, prompt: list[int]) -> Handed:
        """Have the prefill instance compute a prompt.

        Raises:
            ValueError: It is refused.
        """
        instance = self.prefill
        if instance is None:
            return Handed(None, "there is no prefill instance")
        try:
            number = instance.submit(prompt, 1, {"do_remote_decode": True})
            answer = _collected(instance, number, self._prefill_deadline_s)
        except (PeerError, StallError) as error:
            logger.info("%s computes the prompt itself: %s", self.decode.name, error)
            return Handed(None, str(error))
        if answer.state != "finished":
            return Handed(answer, f"the request in {instance.name} {answer.state}: {answer.error}")
        return Handed(answer)


def _collected(instance: Instance, number: int, deadline_s: float) -> Answer:
    try:
        return instance.collect(number, deadline_s)
    except StallError:
        # Nobody waits for it any more; should it be told that much, it has time for others.
        with contextlib.suppress(PeerError, StallError):
            instance.abandon(number)
        raise
