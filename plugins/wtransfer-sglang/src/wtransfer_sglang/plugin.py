"""Register wtransfer's hooks with SGLang, in each of SGLang's processes; all of them, or none.

SGLang logs the exception of a plug-in and starts without it, and it skips a hook whose target it
does not find. A fence that is hooked in part would be none. So everything that the fence rests on
is looked up first.
"""

from __future__ import annotations

import functools
import pkgutil
from typing import TYPE_CHECKING, Any

from wtransfer_sglang import bridge, proof

if TYPE_CHECKING:
    from collections.abc import Callable

RELEASES = ("0.5.23",)
"""Releases of SGLang with which the live tests have run."""
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
RUNNER = "sglang.srt.model_executor.model_runner_components"
LOADERS = "sglang.srt.model_loader.loader"
LOADER = f"{LOADERS}.DefaultModelLoader"

CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"

BEFORE: dict[str, Callable[..., Any]] = {
    f"{RECEIVER}.recv_requests": bridge.add_orders,
    f"{SCHEDULER}.process_input_requests": bridge.carry_out_orders,
    f"{SCHEDULER}.run_batch": bridge.begin_step,
}
"""Targets -> hooks that run before them, and may change their arguments."""
AFTER: dict[str, Callable[..., Any]] = {
    f"{SCHEDULER}.__init__": bridge.open_bridge,
    f"{SCHEDULER}._maybe_namespace_elastic_radix_cache": bridge.name_request,
    f"{SCHEDULER}.process_batch_result": bridge.end_step,
    f"{CONTROLLER}.attach_storage_backend": bridge.heed_storage_end,
    f"{LOADERS}._initialize_model": proof.note_built,
}
"""Targets -> hooks that run after them."""
AROUND: dict[str, Callable[..., Any]] = {
    **{
        f"{UPDATER}.{verb}": functools.partial(bridge.replace_weights, verb)
        for verb in bridge.REPLACING
    },
    f"{SCHEDULER}.handle_update_weight_version": bridge.name_weights,
}
"""Targets -> hooks that call them."""
USED = (
    f"{SCHEDULER}.pause_generation",
    f"{SCHEDULER}.process_pending_chunked_abort",
    f"{SCHEDULER}.send_abort_output",
    f"{SCHEDULER}.collect_inflight_reqs",
    f"{SCHEDULER}.flush_cache",
    f"{SCHEDULER}.continue_generation",
    f"{SCHEDULER}.record_weight_version_change",
    f"{SCHEDULER}.collect_inflight_reqs",
    f"{SCHEDULER}._prefetch_kvcache",
    f"{UPDATER}.offload_tags",
    f"{UPDATER}._session",
    "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.release_aborted_request",
    f"{RUNNER}.weight_updater._unsupported_derived_weight_cache_error",
    f"{LOADER}.restore_weights_before_loading",
    f"{LOADER}.load_weights_and_postprocess",
    "sglang.srt.model_loader.utils.set_default_torch_dtype",
    "sglang.srt.beam_search.coordinator.BeamCoordinator.retire_group",
    "sglang.srt.beam_search.fork.free_member_rows",
    "sglang.srt.managers.schedule_batch.FINISH_ABORT",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.filter_batch",
    "sglang.srt.managers.schedule_batch.retract_all",
    "sglang.srt.managers.io_struct.AbortReq",
    "sglang.srt.managers.io_struct.PauseGenerationReqInput",
    "sglang.srt.managers.io_struct.ContinueGenerationReqInput",
    "sglang.srt.runtime_context.get_parallel",
    "sglang.srt.arg_groups.overrides.resolved_view",
)
"""Further names of SGLang without which there is no fence."""

_EFFECT = (
    "it serves, takes no updates, and its KV cache is not named by weights. Install "
    f"sglang=={RELEASES[-1]}, or a wtransfer-sglang that has run with this release"
)

is_registered = False
"""True once the hooks are registered in this process."""


class UnknownSglangError(RuntimeError):
    """This release of SGLang is not one with which wtransfer-sglang has run."""


def register() -> None:
    """Register the hooks; SGLang calls it in every process, before it makes a scheduler.

    Raises:
        UnknownSglangError: The release is another one, or has no place for a hook; nothing was
            registered, and SGLang logs the error and serves without wtransfer.
    """
    global is_registered  # noqa: PLW0603  # SGLang's registry is one per process, too
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if sglang.__version__ not in RELEASES:
        raise UnknownSglangError(
            f"wtransfer-sglang has run with SGLang {', '.join(RELEASES)}, and this is "
            f"{sglang.__version__}: {_EFFECT}"
        )
    check_names([*BEFORE, *AFTER, *AROUND, *USED])
    for kind, hooks in (
        (HookType.BEFORE, BEFORE),
        (HookType.AFTER, AFTER),
        (HookType.AROUND, AROUND),
    ):
        for target, hook in hooks.items():
            HookRegistry.register(target, hook, kind)
    is_registered = True


def check_names(names: list[str]) -> None:
    """Raise unless SGLang has all of these names.

    Raises:
        UnknownSglangError: It lacks one.
    """
    missing = next((name for name in names if not _exists(name)), None)
    if missing is not None:
        raise UnknownSglangError(
            f"this SGLang has no {missing}, which wtransfer-sglang hooks: {_EFFECT}"
        )


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
