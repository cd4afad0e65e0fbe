"""An engine that `wtransfer_vllm.check` asks: in its own process, and as seen from the other.

python -m wtransfer_vllm.check_engine FD '{...arguments of vllm.LLM...}'

Orders and answers are lines of JSON, over a socket that is open as file descriptor FD. The process
ends when the other side closes it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from wtransfer.errors import WTransferError

from wtransfer_vllm.clients import EngineClient
from wtransfer_vllm.places import rows_of
from wtransfer_vllm.twins import CheckError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HITS = "vllm:external_prefix_cache_hits"
NUM_LIKELY = 5
"""Most probable tokens that an answer has for each step."""
NUM_SETTLING_ASKS = 200
"""Short requests after which stored KV cache must be known as stored."""
CLOSE_S = 5.0
"""Time that an engine is given to end by itself, in seconds."""
NUM_LOG_LINES = 15
"""Lines of an engine's log that an error shows."""
CAUSE = re.compile(r"\b[\w.]+(?:Error|Exception): .*")
"""An exception in an engine's log."""
NUM_CAUSES = 3
"""Exceptions of the log that the error of a failed start shows: the first ones."""
KINDS = {
    "FullAttentionSpec": "full attention",
    "MLAAttentionSpec": "MLA",
    "SlidingWindowSpec": "sliding window",
    "MambaSpec": "linear attention",
}
"""vLLM's kind of KV cache -> its name for people."""
RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


class EngineError(WTransferError, RuntimeError):
    """An engine that is checked has raised; the text is its own."""


class EngineProcess(EngineClient):
    """An engine in a process of its own; the client there makes a publisher's calls.

    Args:
        name: Name of the engine in errors.
        folder: Working folder: the engine finds its model there, and leaves its log.
        options: Arguments of ``vllm.LLM``.
        timeout_s: Longest wait for its start, and for each answer, in seconds.
    """

    is_local = True

    def __init__(self, name: str, folder: Path, options: dict[str, Any], timeout_s: float) -> None:
        super().__init__(self, name, timeout_s)  # it is the engine's handle as well
        self._log = folder / f"{name}.log"
        self._lock = threading.Lock()
        self._line, theirs = socket.socketpair()
        self._line.settimeout(timeout_s)
        self._stream = self._line.makefile("rw")
        # The engine core is in that process as well, unless it has several ranks to command.
        is_one = all(options.get(each, 1) == 1 for each in RANKS)
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not is_one))}
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), json.dumps(options)]
        with theirs, self._log.open("w") as log:
            self._process = subprocess.Popen(  # noqa: S603  # this module
                command,
                cwd=folder,
                env=env | os.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                # A group of its own, to be ended as a whole.
                start_new_session=True,
            )

    def facts(self) -> dict[str, Any]:
        """Wait for the start; return its facts, as `CheckedEngine.facts`. Raises as `do`."""
        try:
            facts: dict[str, Any] = self._hear()
        except EngineError as error:
            # vLLM raises another error than the cause, which its own processes have logged.
            logged = CAUSE.findall(self._log.read_text(errors="replace"))
            causes = [each for each in dict.fromkeys(logged) if each not in str(error)]
            raise EngineError("\n".join([str(error), *causes[:NUM_CAUSES]])) from None
        return facts

    def do(self, order: str, *arguments: Any) -> Any:
        """Give an order, a method of `CheckedEngine`, and return its result.

        Raises:
            EngineError: The engine has raised.
            CheckError: There is no answer.
        """
        with self._lock:
            with contextlib.suppress(OSError):  # it is gone, and there is no answer
                self._stream.write(json.dumps([order, arguments]) + "\n")
                self._stream.flush()
            return self._hear()

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:  # noqa: ARG002  # ours
        """Call a method of the engine's client. Raises as `do`."""
        return self.do(method, *arguments)

    def request(self, make: Callable[[dict[str, Any]], Any], info: dict[str, Any]) -> Any:  # noqa: ARG002
        """Return the info itself: the client in the other process makes vLLM's request of it."""
        return info

    def _hear(self) -> Any:
        why = "ended"
        try:
            answer = json.loads(self._stream.readline() or "null")
        except OSError as error:
            answer, why = None, f"did not answer within {self.timeout_s:g} s ({error})"
        if answer is None:
            log = self._log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
            raise CheckError("\n".join([f"engine {self.name!r} {why}; its log ends:", *log]))
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """End its processes, in good order or not."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._line.close()


class CheckedEngine:
    """The engine, in its process. Each public method is an order, and so are its client's.

    Args:
        options: Arguments of ``vllm.LLM``; the KV connector has wtransfer's name.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        from wtransfer_vllm import names, plugin
        from wtransfer_vllm.clients import LLMClient

        if "kv_transfer_config" in options:
            plugin.register()
            importlib.import_module(plugin.CONNECTOR_FACTORY)
            transfer = options["kv_transfer_config"]
            transfer["kv_connector"] = names.vllm_names("connectors")[transfer["kv_connector"]]
        self._llm: Any = LLM(**options)
        self.client = LLMClient(self._llm)

    def facts(self) -> dict[str, Any]:
        """Return the facts of the check, and the bounds of prompts."""
        import transformers
        import vllm

        config = self._llm.llm_engine.vllm_config.model_config
        settings = config.hf_config.to_dict() | config.hf_text_config.to_dict()
        special = [v for name, v in settings.items() if name.endswith(("token_id", "token_index"))]
        return {
            "model_class": (config.architectures or ["unknown"])[0],
            "quantisation": _quantisation(config),
            "kv_cache": self._kv_cache(),
            "places": {
                row.place: row.at_commit for row in rows_of(self._llm.llm_engine.vllm_config)
            },
            "dtype": str(config.dtype).removeprefix("torch."),
            "vllm": vllm.__version__,
            "transformers": transformers.__version__,
            "vocab_size": config.get_vocab_size(),
            "special_tokens": [each for each in special if isinstance(each, int)],
            "max_model_len": config.max_model_len,
        }

    def _kv_cache(self) -> str | None:
        """Return the groups of the KV cache, each with its number of layers.

        None: the engine core is in another process.
        """
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        if core is None:
            return None
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        return ", ".join(
            f"{_kind(each.kv_cache_spec)} x {len(each.layer_names)}" for each in groups
        )

    def ask(self, prompts: list[list[int]], salt: str, max_tokens: int) -> list[dict[str, Any]]:
        """Return each prompt's most probable tokens, and the other probable ones at each step.

        Args:
            prompts: Tokens.
            salt: Prompts of one salt share KV cache, here and by a connector.
            max_tokens: Tokens of an answer.
        """
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=NUM_LIKELY, ignore_eos=True
        )
        salted: Any = [{"prompt_token_ids": each, "cache_salt": salt} for each in prompts]
        answers = []
        for prompt in salted:
            # Alone: the rest of a batch, and so the rounding, would vary with when KV arrives.
            (output,) = self._llm.generate([prompt], greedy, use_tqdm=False)
            (one,) = output.outputs
            likely = [
                {token: each.logprob for token, each in step.items()} for step in one.logprobs
            ]
            answers.append({"tokens": list(one.token_ids), "likely": likely})
        return answers

    def settle(self, prompt: list[int]) -> bool:
        """Wait until stored KV cache is known as stored, and empty vLLM's own prefix cache.

        Args:
            prompt: A prompt shorter than a block.
        """
        for _ in range(NUM_SETTLING_ASKS):
            self.ask([prompt], "settling", 2)
            if self._llm.reset_prefix_cache():
                return True
        return False

    def hits(self) -> float:
        """Return the number of tokens that have come by the connector."""
        return float(sum(each.value for each in self._llm.get_metrics() if each.name == HITS))


def _quantisation(config: Any) -> str | None:
    """Return the method, and the format of the checkpoint where its configuration has one."""
    scheme = getattr(config.hf_config, "quantization_config", None) or {}
    return " ".join(filter(None, [config.quantization, scheme.get("format")])) or None


def _kind(spec: Any) -> str:
    """Return the kind of a group's layers, or their kinds where vLLM has unified several."""
    specs = getattr(spec, "kv_cache_specs", {"": spec}).values()
    kinds = dict.fromkeys(_kind_of_layer(each) for each in specs)
    return " and ".join(kinds)


def _kind_of_layer(spec: Any) -> str:
    name = type(spec).__name__
    # vLLM keeps every token of a window's layer where a connector takes one group only.
    is_kept_whole = name == "FullAttentionSpec" and spec.sliding_window is not None
    return KINDS.get(name, name) + (" with windows kept whole" if is_kept_whole else "")


def _main(descriptor: str, options: str) -> None:
    with socket.socket(fileno=int(descriptor)) as line, line.makefile("rw") as stream:

        def answer(call: Any) -> bool:
            try:
                said = {"result": call()}
            except Exception as error:
                traceback.print_exc()
                said = {"error": f"{type(error).__name__}: {error}"}
            stream.write(json.dumps(said) + "\n")
            stream.flush()
            return "result" in said

        engine: Any = None

        def start() -> dict[str, Any]:
            nonlocal engine
            engine = CheckedEngine(json.loads(options))
            facts: dict[str, Any] = engine.facts()
            return facts

        if answer(start):
            for order in stream:
                name, arguments = json.loads(order)
                owner = engine if hasattr(engine, name) else engine.client
                answer(lambda: getattr(owner, name)(*arguments))  # noqa: B023  # called at once


if __name__ == "__main__":
    _main(*sys.argv[1:])
