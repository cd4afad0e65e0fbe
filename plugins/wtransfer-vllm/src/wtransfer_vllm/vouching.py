"""Which name KV cache gets for the weights that vLLM has loaded, before any publisher sends others.

A worker that has loaded a checkpoint from disk names its KV cache by the fingerprint that a push of
that checkpoint would have. So instances that have loaded equal weights share it, a restarted one
finds what it has stored, and so does one that has received the same weights.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from wtransfer.errors import SourceError
from wtransfer.manifest import local_fingerprint
from wtransfer.weights import process_weights

from wtransfer_vllm.checkpoint import checkpoint_folder
from wtransfer_vllm.fingerprints import CheckpointFiles
from wtransfer_vllm.outcome import lose_weights

if TYPE_CHECKING:
    from wtransfer.weights import Vouch

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it


def vouch_for_checkpoint(vllm_config: Any) -> None:
    """Name this worker's KV cache by the checkpoint that its model was loaded from. Never raises.

    Called once in each worker process, right after the model was loaded and before any request.

    A sealed checkpoint's fingerprint is in its ``wtransfer.json``. That of another is worked out
    in the background, by one process of the host, and stored for all; until it is known, the
    process has no stamp, and shares KV with nobody. A commit, or `weights_were_replaced`, in the
    meantime counts. Where the fingerprint cannot be known (other load formats, no files, a draft
    model with files of its own, a file that cannot be read), KV cache has a name that only this
    process knows, and the log says why.

    Args:
        vllm_config: vLLM's own; its ``model_config`` stands for the model.
    """
    try:
        vouch = process_weights.vouch_later(vllm_config.model_config)
    except Exception as error:
        logger.warning("nothing is vouched for: %s", error)
        return
    try:
        _check_no_draft(vllm_config)
        files = CheckpointFiles(checkpoint_folder(vllm_config))
        known = files.known_fingerprint()
        if known is None:
            threading.Thread(
                target=_work_out, args=(vouch, files), name="wtransfer-vouch", daemon=True
            ).start()
        else:
            vouch.settle(known)
            logger.info("the weights loaded from %s are known to be %s", files.folder, known)
    except Exception as error:
        _give_up(vouch, error)


def weights_were_replaced(worker: Any, why: str) -> None:
    """Give this worker's KV cache a new name that only its process knows; runs in each worker.

    For weights that another weight backend or ``reload_weights`` has brought. Publishers are told
    where a session has one. Called by the engine core between two steps.

    Args:
        worker: vLLM's own.
        why: What became of the weights, for people.
    """
    lose_weights(worker, why)
    process_weights.weights_replaced(worker.vllm_config.model_config)


def _work_out(vouch: Vouch, files: CheckpointFiles) -> None:
    begun = time.monotonic()
    try:
        found = files.fingerprint()
        vouch.settle(found)
    except Exception as error:
        _give_up(vouch, error)
    else:
        seconds = time.monotonic() - begun
        logger.info("the weights loaded from %s are %s (%.1f s)", files.folder, found, seconds)


def _give_up(vouch: Vouch, error: Exception) -> None:
    vouch.settle(local_fingerprint())
    logger.warning(
        "KV cache is not shared with other processes until the next weight update: %s", error
    )


def _check_no_draft(vllm_config: Any) -> None:
    """Raise if a second checkpoint was loaded, whose layers have KV cache as well."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.model != vllm_config.model_config.model:
        raise SourceError(f"the draft model {draft.model!r} has weights of its own")
