"""The configuration of a checkpoint's model, read, written canonically and compared.

Plain data: the classes of its entries belong to serving engines and training libraries.
"""

from __future__ import annotations

import functools
import json
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from wtransfer.errors import SourceError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wtransfer.transport.files import Folder

CONFIG_NAME = "config.json"
"""File of a checkpoint with its model's configuration."""
MAX_CONFIG_NBYTES = 64 << 20
"""Largest configuration on disk, in bytes: some list every layer that is not quantised."""
MAX_LAYERS = 1 << 20
"""Most layers: a class that reads the number may make an entry for each."""
MAX_SHOWN = 80
"""Longest value that a difference shows, in characters."""

NOT_COMPARED = (
    # Paths, versions, and the classes of files beside it.
    *("_name_or_path", "name_or_path", "_commit_hash", "_auto_class", "_from_*", "auto_map"),
    *("transformers_version", "transformers.js_config", "_diffusers_version", "*unsloth_*"),
    *("architectures", "tokenizer_class", "processor_class"),
    # Execution, which each side chooses; dtypes are checked with the tensors.
    *("dtype", "torch_dtype", "*attn_implementation*", "*experts_implementation*", "use_cache"),
    *("use_flash_attention*", "_flash_attn*", "_output_attentions", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "output_scores", "output_past"),
    *("return_dict", "use_return_dict", "torchscript", "use_bfloat16", "tf_legacy_loss"),
    *("pretraining_tp", "chunk_size_feed_forward", "*tp_plan", "*pp_plan", "cache_implementation"),
    *("has_no_defaults_at_init", "keys_to_ignore_at_inference"),
    # Training alone.
    *("*dropout*", "*pdrop", "*layerdrop", "*drop_rate", "drop_path*", "gradient_checkpointing*"),
    *("*init_std", "init_xavier_std", "*initializer_range", "initializer_factor"),
    *("initializer_std", "initializer_cutoff_factor", "initializer_bias_prior_prob"),
    *("*_init_value", "*init_values", "init_device", "*init_variance_scale", "layer_norm_init"),
    *("learnable_sink_init", "time_step_init_scheme", "seq_aux", "loss_type"),
    *("*aux_loss*", "*z_loss*", "*loss_coef*", "*loss_weight*", "router_*loss*"),
    # Names of classes; their number is checked with the tensors.
    *("id2label", "label2id", "num_labels", "finetuning_task"),
    # Tokens that end, begin or fill a text, and other settings of generation.
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id"),
    *("mask_token_id", "unk_token_id", "decoder_start_token_id", "forced_*_token_id"),
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "task_specific_params"),
    *("max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample"),
    *("early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature"),
    *("top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("*no_repeat_ngram_size", "num_return_sequences", "prefix", "stop_strings"),
    *("remove_invalid_values", "renormalize_logits", "exponential_decay_length_penalty"),
    # Checked with the tensors.
    *("quantization_config", "compression_config", "quantization", "tie_*"),
)
"""Patterns of entries, at any depth: their differences change nothing that is served, or are found
by another check."""
COMPARED = ("*token_dropout",)
"""Patterns of entries that `NOT_COMPARED` has as well, and that are compared: what is dropped in
training is made up for in serving."""
COMPARED_OF = {
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "esm", "mpnet"),
        ("pad_token_id",),
    ),
    "bert": ("cls_token_id", "sep_token_id"),
    "hrm_text": ("initializer_range",),
    "longcat_flash_ngram": ("pad_token_id", "eos_token_id"),
    "moondream3": ("bos_token_id",),
}
"""Type of a model -> entries with which it computes, as positions behind the padding."""
FALSE_BY_DEFAULT = frozenset({"add_cross_attention", "is_decoder", "is_encoder_decoder"})
"""Entries that releases of transformers before 5 wrote into every part, and that are false."""
OLDER_POSITIONS = ("rope_theta", "rope_scaling")
"""Entries that ``rope_parameters`` has since transformers 5."""


def read_config(folder: Folder, *, follow_links: bool = True) -> dict[str, Any] | None:
    """Read the ``config.json`` of a folder; None if there is none.

    Raises:
        SourceError: The file is too large, or holds no configuration.
    """
    try:
        raw = folder.read(CONFIG_NAME, MAX_CONFIG_NBYTES, follow=follow_links)
        return None if raw is None else parse_config(raw)
    except (StorageError, ValueError) as error:
        raise SourceError(f"'{folder.path}/{CONFIG_NAME}' cannot be read: {error}") from error


def parse_config(text: str | bytes) -> dict[str, Any]:
    """Return the configuration that a text holds.

    Raises:
        ValueError: The text holds none: no JSON, no object, nested too deep, more than `MAX_LAYERS`
            layers.
    """
    try:
        # Not by msgspec: transformers writes infinity, which JSON does not have.
        found = json.loads(text, object_hook=_entries)
    except (OverflowError, RecursionError, TypeError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, got {type(found).__name__}")  # noqa: TRY004
    return found


def canonical_config(config: Mapping[str, Any]) -> str:
    """Return a configuration as text, without what is not compared: equal for equal ones.

    What JSON does not have becomes null, but for numbers of other libraries.

    Raises:
        ValueError: It contains itself, or is nested too deep.
    """
    try:
        # Names become texts first: those of integers do not sort beside others.
        plain = json.loads(json.dumps(compared(config), default=_plain, skipkeys=True))
        return json.dumps(plain, sort_keys=True, separators=(",", ":"))
    except RecursionError as error:
        raise ValueError(str(error)) from error


def compared(value: Any) -> Any:
    """Return a configuration, or a part of one, without what is not compared."""
    if isinstance(value, dict):
        also = COMPARED_OF.get(str(value.get("model_type")), ())
        return {
            name: compared(each)
            for name, each in value.items()
            if name in also or not _is_skipped(str(name))
        }
    return [compared(each) for each in value] if isinstance(value, (list, tuple)) else value


def differences(own: Mapping[str, Any], received: Mapping[str, Any]) -> list[str]:
    """Return a line for each entry, by its path, that has other values in two configurations.

    None is as good as no entry.

    Args:
        own: One, as a class has read it.
        received: The other, as the same class has read it.

    Raises:
        ValueError: As `canonical_config`.
    """
    plain = [_in_one_form(json.loads(canonical_config(each))) for each in (own, received)]
    return [
        f"{path} is {_shown(here)} here and {_shown(there)} in the update"
        for path, here, there in _differing(plain[0], plain[1], "")
    ]


def _differing(own: Any, received: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    # As None is no entry, it is also a configuration without entries.
    parts = [{} if each is None else each for each in (own, received)]
    if own != received and isinstance(parts[0], dict) and isinstance(parts[1], dict):
        own, received = parts
        names = {*own, *received}
        if own.get("rope_parameters") and received.get("rope_parameters"):
            # Beside those, a class has the defaults of the older entries.
            names -= {name for name in OLDER_POSITIONS if not (name in own and name in received)}
        for name in sorted(names):
            inner = f"{path}.{name}" if path else name
            yield from _differing(own.get(name), received.get(name), inner)
    # NaN is not equal to itself.
    elif own != received and (own == own or received == received):  # noqa: PLR0124
        yield path, own, received


def _in_one_form(value: Any) -> Any:
    """Return a configuration, or a part of one, as transformers writes it since release 5.

    Classes that were written for earlier releases leave entries as they find them.
    """
    if isinstance(value, list):
        return [_in_one_form(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {
        name: each if name == "rope_parameters" else _in_one_form(each)
        for name, each in value.items()
        if each is not False or name not in FALSE_BY_DEFAULT
    }
    theta, scaling = found.get("rope_theta"), found.get("rope_scaling") or {}
    if theta is not None and not found.get("rope_parameters") and isinstance(scaling, dict):
        rest = {name: each for name, each in found.items() if name not in OLDER_POSITIONS}
        kind = {"rope_type": scaling.get("type", "default")}
        scaling = {name: each for name, each in scaling.items() if name != "type"}
        return {**rest, "rope_parameters": {**kind, **scaling, "rope_theta": theta}}
    return found


def _entries(found: dict[str, Any]) -> Any:
    # Written so by transformers: infinity is none of JSON's numbers.
    if found.keys() == {"__float__"}:
        return float(found["__float__"])
    for name, each in found.items():
        if "layer" in name and isinstance(each, int) and each > MAX_LAYERS:
            raise ValueError(f"{name} is {each}, more than {MAX_LAYERS}")
    return found


@functools.lru_cache(4096)
def _is_skipped(name: str) -> bool:
    skipped, kept = (
        any(fnmatchcase(name, each) for each in patterns) for patterns in (NOT_COMPARED, COMPARED)
    )
    return skipped and not kept


def _plain(value: object) -> object:
    """Return a number of another library as Python's, and anything else as null."""
    try:
        found = value.item()  # type: ignore[attr-defined]
    except Exception:
        return None
    return found if isinstance(found, (bool, int, float, str)) else None


def _shown(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
