"""A router for a prefill and a decode instance."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.errors import PeerError, StallError

if TYPE_CHECKING:
    from wtransfer.testing.mini_engine.instance import Answer, Instance

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Handed:
    """Result of the prefill instance."""

    answer: Answer | None
    """None: the instance did not answer."""
    why: str | None = None
    """Reason that the decode instance has to compute the prompt itself; None: it need not."""


@dataclass(frozen=True)
class Routed:
    """Result of a routed prompt."""

    answer: Answer
    """Answer of the decode instance."""
    handed: Handed
    """Result of the prefill instance."""


class Router:
    """Has one instance compute the prompt, and another one generate the tokens.

    The prefill instance generates a single token, with ``do_remote_decode``; the
    ``kv_transfer_params`` that it returns go to the decode instance with the same prompt. If the
    prefill instance is lost or late, the decode instance computes the prompt itself, and the tokens
    are the same.

    Args:
        prefill: Computes prompts; may be replaced at any time. None: the decode instance does.
        decode: Generates tokens.
        prefill_deadline_s: Longest time for a prompt in the prefill instance.
    """

    def __init__(
        self, prefill: Instance | None, decode: Instance, prefill_deadline_s: float = 30.0
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self._prefill_deadline_s = prefill_deadline_s

    def ask(self, prompt: list[int], max_new_tokens: int, deadline_s: float = 60.0) -> Routed:
        """Serve a prompt with both instances.

        Args:
            prompt: Tokens.
            max_new_tokens: Number of tokens to generate.
            deadline_s: Longest time in the decode instance.

        Raises:
            ValueError: An instance refused the request.
            PeerLostError: The decode instance is lost.
            StallError: The decode instance did not answer in time.
        """
        return self.go_on(prompt, max_new_tokens, self.hand_over(prompt), deadline_s)

    def hand_over(self, prompt: list[int]) -> Handed:
        """Have the prefill instance compute a prompt.

        Raises:
            ValueError: The prefill instance refused the request.
        """
        instance = self.prefill
        if instance is None:
            return Handed(None, "there is no prefill instance")
        try:
            params = {"do_remote_decode": True}
            answer = instance.ask(prompt, 1, params, self._prefill_deadline_s)
        except (PeerError, StallError) as error:
            logger.info("%s computes the prompt itself: %s", self.decode.name, error)
            return Handed(None, str(error))
        if answer.state != "finished":
            return Handed(answer, f"the request in {instance.name} {answer.state}: {answer.error}")
        return Handed(answer)

    def go_on(
        self, prompt: list[int], max_new_tokens: int, handed: Handed, deadline_s: float = 60.0
    ) -> Routed:
        """Have the decode instance go on after `hand_over`; raises as `ask`."""
        # The blocks of a request that did not finish may be there in part, or soon be released.
        params = handed.answer.kv_transfer_params if handed.answer and not handed.why else None
        return Routed(self.decode.ask(prompt, max_new_tokens, params, deadline_s), handed)
