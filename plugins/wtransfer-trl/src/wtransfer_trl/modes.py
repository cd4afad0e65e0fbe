"""Put wtransfer's updates in the place of TRL's own, in each ``vllm_mode``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trl
from packaging.specifiers import SpecifierSet

from wtransfer_trl.policy_sync import check_on_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer_trl.policy_sync import OnError

TRL_RANGE = ">=1.16,<1.17"


def install(
    engine: str = "shm",
    *,
    options: Mapping[str, Any] | None = None,
    on_error: OnError = "raise",
    **publisher: Any,
) -> None:
    """Have the trainers of TRL that are made in this process from then on publish by wtransfer.

    For trainers with ``vllm_mode="server"`` or ``"colocate"``. A second call replaces the arguments
    of the first.

    Args:
        engine: Name of the engine: ``backend`` of the server's ``--weight-transfer-config``. A vLLM
            in this process is given it.
        options: Options of the engine.
        on_error: ``"raise"``: a failed update raises in the trainer's thread. ``"keep"``: it is
            logged and counted (`Metrics`), and training goes on with the policy that is served.
        **publisher: Further arguments of `wtransfer.Publisher`: ``token``, ``deadline_s``,
            ``return_s`` (default for a server: 300)...

    Raises:
        ValueError: `on_error` is neither.
        ImportError: TRL is of another version than those whose client is known.
    """
    check_on_error(on_error)
    if not SpecifierSet(TRL_RANGE).contains(trl.__version__, prereleases=True):
        raise ImportError(
            f"wtransfer-trl replaces methods of TRL {TRL_RANGE}, and this is TRL "
            f'{trl.__version__}: pip install "trl{TRL_RANGE}"'
        )
    from wtransfer_trl import colocated, policy_form, server_mode

    policy_form.replace()
    for mode in (server_mode, colocated):
        mode.replace(
            engine=engine,
            options=dict(options or {}),
            on_error=on_error,
            **publisher,
        )
