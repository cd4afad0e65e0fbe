"""Name the LoRA adapters of an engine core by what was loaded: that name is part of block hashes.

vLLM's hashes of a request's blocks have the name and the folder of its adapter, which stay as they
are where other weights are loaded under that name. Here each load gives an adapter a name of its
own, and requests get it as they are looked up:

| event                                  | effect                                                  |
| an adapter is loaded for the first     | it keeps its name                                       |
|   time, or by a request                |                                                         |
| it is loaded once more by `add_lora`:  | ``name#1``, ``name#2``, ...; before the workers load it |
|   in place, or with another number     |                                                         |
| a request that asks for a load in      | its adapter is loaded before the next batch is          |
|   place is added                       | scheduled, once, and the request asks no more           |
| a request is looked up, with no        | its adapter has the present name, and its hashes are    |
|   computed token: new, preempted,      | made anew, in the list that others hold                 |
|   begun anew                           |                                                         |

Requests that run at a load go on, as vLLM has it: the adapter that was loaded computes over KV of
the one before. Their blocks keep the name before, which no request has as it is looked up.

All of it happens on the engine core's own thread. Its front end knows adapters by their names, so
that answers, metrics and logs are as they were.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from wtransfer_vllm.block_hashes import begin_anew

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_UPS = ("get_computed_blocks", "get_computed_blocks_for_connector")
"""Methods of vLLM's KV cache manager that look a request up in the prefix cache."""
TOWERS = "enable_tower_connector_lora"
"""Option of vLLM's: adapters change encoders as well; not in every release."""


class Adapters:
    """Names the adapters of one engine core.

    Args:
        core: vLLM's ``EngineCore``, with its scheduler.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._names: dict[int, str] = {}
        """Number of an adapter -> name of what was loaded last under it."""
        self._taken: set[str] = set()
        self._due: dict[int, Any] = {}
        """Number of an adapter -> the last request for a load in place."""
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
        if adapter is not None and _is_in_place(adapter):
            self._due[adapter.lora_int_id] = adapter
            request.lora_request = replace(adapter, load_inplace=False)

    def name(self, adapter: Any) -> None:
        """Give an adapter that vLLM is about to load a name of its own."""
        number = adapter.lora_int_id
        if not _is_in_place(adapter) and number in self._core.list_loras():
            return
        self._names[number] = name = self._take(adapter.lora_name)
        has_encoders = getattr(self._core.vllm_config.lora_config, TOWERS, False)
        if has_encoders and name != adapter.lora_name:
            # Their outputs have the name that the front end knows.
            self._core.reset_encoder_cache()

    def _load(self) -> None:
        while self._due:
            _, adapter = self._due.popitem()
            self._core.add_lora(adapter)

    def _take(self, name: str) -> str:
        names = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(1)))
        free = next(each for each in names if each not in self._taken)
        self._taken.add(free)
        return free

    def _begin(self, request: Any) -> None:
        adapter = request.lora_request
        if adapter is None:
            return
        number = adapter.lora_int_id
        if number not in self._names:
            self._names[number] = self._take(adapter.lora_name)
        if adapter.lora_name == self._names[number]:
            return
        request.lora_request = replace(adapter, lora_name=self._names[number])
        request.block_hashes.clear()
        request.update_block_hashes()
        begin_anew(self._core.scheduler, request)


def load_once(models: type[Any], is_ours: Callable[[Any], bool]) -> None:
    """Have vLLM's server load an adapter in place in that call, and not again for each request.

    Args:
        models: vLLM's ``OpenAIServingModels``, in whose table an adapter keeps the order to load.
        is_ours: Tells of a client of an engine core whether that names its adapters.
    """
    load = models.load_lora_adapter

    @functools.wraps(load)
    async def load_lora_adapter(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await load(self, request, *args, **kwargs)
        adapter = self.lora_requests.get(request.lora_name)
        if adapter is not None and _is_in_place(adapter) and is_ours(self.engine_client):
            self.lora_requests[request.lora_name] = replace(adapter, load_inplace=False)
        return answer

    models.load_lora_adapter = load_lora_adapter


def _is_in_place(adapter: Any) -> bool:
    return bool(getattr(adapter, "load_inplace", False))  # not in every release
