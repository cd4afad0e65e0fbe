"""Name the LoRA adapters of an engine core by what was loaded: that name is part of block hashes.

vLLM's hashes of a request's blocks have the name and the folder of its adapter, which stay as they
are where other weights are loaded under that name. Here each load gives an adapter a name of its
own, and requests get that adapter, with its name and folder, as they are looked up:

| event                                  | effect                                                  |
| an adapter is loaded for the first     | it keeps its name                                       |
|   time, or by a request                |                                                         |
| it is loaded once more by `add_lora`:  | ``name#1``, ``name#2``, ...; before the workers load it |
|   in place, or with another number     |                                                         |
| a load fails                           | the adapter before, under a further name                |
| a number is removed by `remove_lora`   | nothing is known of it: whatever comes is loaded anew   |
| a request is added whose adapter was   | the same: vLLM loads it where its workers do not hold   |
|   not loaded under its number          | that number                                             |
| a request that asks for a load in      | its adapter is loaded before the next batch is          |
|   place is added                       | scheduled, once, and the request asks no more; not      |
|                                        | before vLLM is awake and resumed, nor for a request     |
|                                        | that has ended by then                                  |
| a request is looked up, with no        | it has the adapter that was loaded last, and its hashes |
|   computed token: new, preempted,      | are made anew, in the list that others hold             |
|   begun anew                           |                                                         |

Requests that run at a load go on, as vLLM has it: the adapter that was loaded computes over KV of
the one before. Their blocks keep the name before, which no request has as it is looked up.

All of it happens on the engine core's own thread. Its front end knows adapters by their names, so
that answers, metrics and logs are as they were.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from wtransfer_vllm.block_hashes import begin_anew

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_UPS = ("get_computed_blocks", "get_computed_blocks_for_connector")
"""Methods of vLLM's KV cache manager that look a request up in the prefix cache."""
TOWERS = "enable_tower_connector_lora"
"""Option of vLLM's: adapters change encoders as well; not in every release."""


class Loaded(NamedTuple):
    """What was loaded last under a number."""

    adapter: Any
    """What requests get: vLLM's ``LoRARequest`` with a name of ours and no order to load."""
    users_name: str
    asked_as: frozenset[tuple[str, str]]
    """Names and folders with which requests mean this adapter: of those that were loaded under the
    number, up to this one."""


class Adapters:
    """Names the adapters of one engine core.

    Args:
        core: vLLM's ``EngineCore``, with its scheduler.
        is_asleep: Tells whether the weights have no memory.
    """

    def __init__(self, core: Any, is_asleep: Callable[[], bool]) -> None:
        self._core = core
        self._is_asleep = is_asleep
        self._loaded: dict[int, Loaded] = {}
        """Number of an adapter -> what was loaded last under it."""
        self._taken: set[str] = set()
        self._due: dict[int, list[tuple[Any, Any]]] = {}
        """Number of an adapter -> requests for a load in place, and the adapters they bring."""
        self._encoders_are_stale = False
        scheduler = core.scheduler
        manager, schedule = scheduler.kv_cache_manager, scheduler.schedule

        def load_and_schedule(*args: Any, **kwargs: Any) -> Any:
            self._load()
            return schedule(*args, **kwargs)

        def naming(look_up: Callable[..., Any]) -> Callable[..., Any]:
            def name_and_look_up(request: Any) -> Any:
                self._begin(request)
                return look_up(request)

            return name_and_look_up

        scheduler.schedule = load_and_schedule
        for name in LOOK_UPS:
            if hasattr(manager, name):  # older releases have one of them
                setattr(manager, name, naming(getattr(manager, name)))

    def admit(self, request: Any) -> None:
        """Take the order to load in place, if a request has it; vLLM would in every step."""
        adapter = request.lora_request
        if adapter is None:
            return
        if _is_in_place(adapter):
            self._due.setdefault(adapter.lora_int_id, []).append((request, adapter))
            request.lora_request = replace(adapter, load_inplace=False)
        else:
            self._meant_by(adapter)

    def load(self, call: Callable[[Any], Any], adapter: Any) -> Any:
        """Return the result of `call`, which loads an adapter: it has a name of its own before."""
        number = adapter.lora_int_id
        if not _is_in_place(adapter) and number in self._core.list_loras():
            return call(adapter)
        before = self._loaded.get(number)
        asked_as = before.asked_as if before else frozenset()
        self._hold(adapter, asked_as)
        try:
            return call(adapter)
        except BaseException:
            # Some workers may hold it, and the others what they held.
            if before is None:
                self.forget(number)
            else:
                self._hold(replace(before.adapter, lora_name=before.users_name), asked_as)
            raise

    def forget(self, number: int) -> None:
        """Forget what was loaded under a number, which vLLM is about to remove."""
        self._loaded.pop(number, None)
        self._encoders_are_stale = True

    def _hold(self, adapter: Any, asked_as: frozenset[tuple[str, str]] = frozenset()) -> Any:
        """Return an adapter under a name of its own, from here on what its number means."""
        name = self._take(adapter.lora_name)
        held = replace(adapter, lora_name=name)
        if _is_in_place(held):
            held = replace(held, load_inplace=False)
        asked_as |= {_key(adapter), _key(held)}
        self._loaded[adapter.lora_int_id] = Loaded(held, adapter.lora_name, asked_as)
        # Their outputs have the name that the front end knows.
        self._encoders_are_stale |= name != adapter.lora_name
        return held

    def _meant_by(self, adapter: Any) -> Any:
        """Return what a request for an adapter gets."""
        loaded = self._loaded.get(adapter.lora_int_id)
        if loaded is not None and _key(adapter) in loaded.asked_as:
            return loaded.adapter
        return self._hold(adapter)

    def _load(self) -> None:
        scheduler = self._core.scheduler
        if self._is_asleep() or getattr(scheduler, "pause_state", False):  # not in every release
            return
        while self._due:
            askers = self._due.pop(next(iter(self._due)))
            adapters = [each for asker, each in askers if asker.request_id in scheduler.requests]
            if adapters:
                self._core.add_lora(adapters[-1])
        # Here and not where a name is taken, which may be within the scheduling of a batch.
        if self._encoders_are_stale and getattr(self._core.vllm_config.lora_config, TOWERS, False):
            self._core.reset_encoder_cache()
        self._encoders_are_stale = False

    def _take(self, name: str) -> str:
        names = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(1)))
        free = next(each for each in names if each not in self._taken)
        self._taken.add(free)
        return free

    def _begin(self, request: Any) -> None:
        adapter = request.lora_request
        if adapter is None:
            return
        held = self._meant_by(adapter)
        if adapter.lora_name == held.lora_name:
            return
        request.lora_request = held
        request.block_hashes.clear()
        request.update_block_hashes()
        begin_anew(self._core.scheduler, request)


def load_once(models: type[Any] | None, is_ours: Callable[[Any], bool]) -> None:
    """Have vLLM's server load an adapter in place in that call, and not again for each request.

    Args:
        models: vLLM's ``OpenAIServingModels``, in whose table an adapter keeps the order to load;
            one of another shape stays as it is, and adapters are read again for each request.
        is_ours: Tells of a client of an engine core whether that names its adapters.
    """
    load = getattr(models, "load_lora_adapter", None)
    if models is None or load is None:
        return

    @functools.wraps(load)
    async def load_lora_adapter(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await load(self, request, *args, **kwargs)
        adapter = self.lora_requests.get(request.lora_name)
        if adapter is not None and _is_in_place(adapter) and is_ours(self.engine_client):
            self.lora_requests[request.lora_name] = replace(adapter, load_inplace=False)
        return answer

    models.load_lora_adapter = load_lora_adapter


def _key(adapter: Any) -> tuple[str, str]:
    return adapter.lora_name, adapter.lora_path


def _is_in_place(adapter: Any) -> bool:
    return bool(getattr(adapter, "load_inplace", False))  # not in every release
