"""Numbers of the weight updates, in what TRL logs."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from wtransfer_trl.policy_sync import last_numbers


class Metrics(TrainerCallback):
    """Adds the numbers of the last weight update to each entry of the trainer's log.

    ``wtransfer/version`` (number of the update that vLLM holds; 0: none of this run, or vLLM does
    not say), ``wtransfer/stale_steps`` (updates since), ``wtransfer/seconds`` and
    ``wtransfer/bytes`` (of the last update that succeeded). They reach
    ``trainer.state.log_history`` and the callbacks that follow this one; integrations of
    ``report_to`` come before the callbacks of a user and do not see them.
    """

    def on_log(
        self,
        args: Any,  # noqa: ARG002  # transformers' signature
        state: Any,
        control: Any,  # noqa: ARG002
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add the numbers; transformers calls it."""
        numbers = last_numbers()
        if logs is not None:
            logs.update(numbers)
        # The trainer has entered a copy of `logs` before its callbacks run.
        if state.log_history:
            state.log_history[-1].update(numbers)
