"""vLLM's reload of a model: run, and put right where it leaves something out.

vLLM packs, fuses and quantises parameters after loading. Its layerwise reload takes a model back to
the form of the checkpoint, loads, processes each layer again once it is complete, and copies the
result into the tensors that the kernels read. Where the result differs from that of the first load,
the model computes with other weights than it was given, and no error says so. So no update is
applied before `wtransfer_vllm.proof` has found that the reload of the served weights gives those.

Put right here, by cause:

* a quantisation method packs experts only the first time: `Reload._forget_first_processing`;
* a model's loader copies past the weight loader of a parameter: `_DirectCopies`;
* a head shares its tensor with an embedding, and has a packed copy of it: `Reload._finish`;
* an attention layer packs the weight of another layer and frees it: `Reload._keep_freed`;
* a kernel points to scales that are freed once they are copied: `_keeping_scales`;
* a layer cannot be processed, and those behind it stay without tensors: `Reload._process`;
* a kernel is made for torch's default dtype, which is the model's only at the first load, and a
  parameter that is None once its weight is packed is deleted: `Reload.run`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from wtransfer.errors import WTransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

STOOD_IN = (
    "_copy_and_restore_kernel_tensors",
    "_finalize_attention_layer",
    "_layerwise_process",
    "get_numel_loaded",
    "materialize_layer",
)
"""Functions of vLLM's reload that are replaced while one runs."""
MAX_LISTED = 3
"""Layers that an error lists."""


class ReloadError(WTransferError, RuntimeError):
    """vLLM's reload does not give the loaded weights, or the result cannot be known."""


class Fault(NamedTuple):
    """A fault of a reload in one layer."""

    layer: str
    """Name of the layer."""
    tensor: str | None
    """The parameter or buffer; None: the layer as a whole."""
    cause: str
    """The cause."""

    def __str__(self) -> str:
        place = f"layer {self.layer!r}" + (f", parameter {self.tensor!r}" if self.tensor else "")
        return f"{place}: {self.cause}"


def reload(model: nn.Module, vllm_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load a whole set into a model that serves, and have vLLM process every layer.

    Args:
        model: The model. No step of it may run meanwhile.
        vllm_config: vLLM's own.
        weights: The set, in the form of the checkpoint.

    Raises:
        ReloadError: A layer could not be processed, or received nothing.
        Exception: The error of the model's loader. After either, complete layers have the new
            weights and the others the old ones: another whole load must follow.
    """
    Reload(model, vllm_config).run(weights)


class Reload:
    """One reload of a model.

    Args:
        model: The model.
        vllm_config: vLLM's own.

    Raises:
        ReloadError: This release's reload has another shape than the known one.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        missing = [name for name in STOOD_IN if not hasattr(layerwise, name)]
        if missing:
            raise ReloadError(f"this vLLM's reload is not known here: it has no {missing[0]}")
        self.faults: list[Fault] = []
        self._vllm: Any = layerwise
        self._original = {name: getattr(layerwise, name) for name in STOOD_IN}
        self._model: Any = model
        self._vllm_config = vllm_config
        self._layers = {layer: name for name, layer in model.named_modules()}
        self._copies = _DirectCopies()

    def run(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Have vLLM reload.

        Raises:
            ReloadError: A layer is at fault.
            Exception: The error of the model's loader.
        """
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        with (
            set_current_vllm_config(self._vllm_config),
            # As at the first load; tensors of inference mode could not be written to later.
            set_default_torch_dtype(self._vllm_config.model_config.dtype),
            torch.inference_mode(mode=False),
            torch.no_grad(),
            _without_mtp_check(),
            _keeping_names(self._layers),
            self._standing_in(),
            self._forget_first_processing(),
            _keeping_scales(),
        ):
            self._vllm.initialize_layerwise_reload(self._model)
            tied: list[nn.Module] = []
            try:
                self._prepare()
                self._load(weights)
                tied = self._find_empty()
            except BaseException:
                forget_parts(self._model)
                raise
            finally:
                self._vllm.finalize_layerwise_reload(self._model, self._vllm_config.model_config)
                self._finish(tied)
        if self.faults:
            raise ReloadError(listed(self.faults))

    # -- where a proof differs

    def _prepare(self) -> None:
        """Prepare the layers, whose tensors are on the meta device by now."""
        for layer in self._layers:
            for name, parameter in self._info(layer).restore_metadata[0].items():
                self._copies.watch(parameter, layer, name)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        def between() -> Iterator[tuple[str, torch.Tensor]]:
            for weight in weights:
                yield weight
                self._process_complete()

        with self._copies:
            self._model.load_weights(between())
        self._process_complete()

    def _process(
        self, process: Callable[..., None], layer: nn.Module, info: Any, *args: Any
    ) -> None:
        """Have vLLM process one layer. If it cannot, the layer keeps its old tensors.

        Never raises: vLLM would leave the layers behind it on the meta device.

        Args:
            process: vLLM's function.
            layer: The layer.
            info: vLLM's state of its reload.
            *args: Further arguments of the function: of an attention layer the model's
                configuration.
        """
        kernel, unsaved = info.kernel_tensors, unsaved_buffers(info)
        try:
            process(layer, info, *args)
        except Exception as error:
            self._fault(layer, None, f"{type(error).__name__}: {error}")
            self._place(layer, info, kernel, unsaved)

    def _fill(self, tensor: torch.Tensor) -> None:
        """Fill memory of a layer, before its weights are loaded into it."""

    def _keep_freed(self, layer: nn.Module, info: Any) -> None:
        """Keep weights whose kernel's tensor is empty, for the layer that packs them for itself.

        The packing layer is processed later, and frees them again: MLA does so with its
        ``kv_b_proj``.
        """
        kernel = info.kernel_tensors[0]
        for name, tensor in kernel.items():
            made = getattr(layer, name)
            if made.numel() and not tensor.numel():
                kernel[name] = made

    def _finish(self, tied: list[nn.Module]) -> None:
        """Do the remaining work once every layer has its tensors.

        Args:
            tied: Layers whose tensors came by other layers. A CPU's kernel has a packed copy.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        for layer in tied:
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(layer)

    # -- what every reload does

    def _info(self, layer: nn.Module) -> Any:
        return self._vllm.get_layerwise_info(layer)

    def _fault(self, layer: nn.Module, tensor: str | None, cause: str) -> None:
        self.faults.append(Fault(self._layers.get(layer, type(layer).__name__), tensor, cause))

    def _packed(self, layer: nn.Module, info: Any) -> set[str]:
        """Return the parameters of the checkpoint whose weight is in no tensor that serves.

        Only kernels of CPUs have it elsewhere; others delete what they have put into another
        parameter. Attention layers delete their scales, which have become numbers.
        """
        is_attention = self._vllm.is_deferred_attention_layer(layer)
        if info.restore_device.type != "cpu" or is_attention:
            return set()
        kernel = info.kernel_tensors[0]
        return {
            name
            for name, tensor in info.restore_metadata[0].items()
            if tensor.numel() and (name not in kernel or not kernel[name].numel())
        }

    def _place(self, layer: nn.Module, info: Any, kernel: Any, unsaved: set[str]) -> None:
        """Give a layer the tensors that its kernels read; `unsaved`: buffers that are no state."""
        info.kernel_tensors, info.kernel_non_persistent_buffers = kernel, unsaved
        self._vllm._place_kernel_tensors(layer, info)
        info.reset()

    @contextlib.contextmanager
    def _standing_in(self) -> Iterator[None]:
        original = self._original

        def materialize(layer: nn.Module, info: Any) -> None:
            before = self._vllm.get_layer_tensors(layer)
            original["materialize_layer"](layer, info)
            for name, tensor in before.items():
                if tensor.is_meta:
                    self._fill(getattr(layer, name))
            self._copies.replay(layer)

        def get_numel_loaded(*args: Any) -> Any:
            # Copies by a weight loader are deferred by vLLM itself.
            with self._copies.paused():
                return original["get_numel_loaded"](*args)

        def copy_and_restore(layer: nn.Module, info: Any) -> None:
            self._keep_freed(layer, info)
            original["_copy_and_restore_kernel_tensors"](layer, info)

        stand_ins = {
            "_copy_and_restore_kernel_tensors": copy_and_restore,
            "_finalize_attention_layer": lambda *args: self._process(
                original["_finalize_attention_layer"], *args
            ),
            "_layerwise_process": lambda *args: self._process(
                original["_layerwise_process"], *args
            ),
            "get_numel_loaded": get_numel_loaded,
            "materialize_layer": materialize,
        }
        try:
            for name, stand_in in stand_ins.items():
                setattr(self._vllm, name, stand_in)
            yield
        finally:
            for name in stand_ins:
                setattr(self._vllm, name, original[name])

    @contextlib.contextmanager
    def _forget_first_processing(self) -> Iterator[None]:
        """Have methods that pack experts only the first time do it again.

        Their kernels stay the same objects: captured graphs have their addresses, and the kernels
        read the tensors that a reload copies into.
        """
        from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

        methods = [getattr(layer, "quant_method", None) for layer in self._layers]
        kernels = {
            method: method.moe_kernel
            for method in methods
            if isinstance(method, UnquantizedFusedMoEMethod)
        }
        try:
            for method in kernels:
                method.moe_kernel = None
            yield
        finally:
            for method, kernel in kernels.items():
                method.moe_kernel = kernel

    def _process_complete(self) -> None:
        """Process the layers that the model's own copies have completed."""
        for layer, numel in self._copies.take_numel():
            info = self._info(layer)
            info.load_numel += numel
            if info.can_load() and info.load_numel >= info.load_numel_total:
                with self._copies.paused():
                    self._vllm._layerwise_process(layer, info)

    def _find_empty(self) -> list[nn.Module]:
        """Record a fault of each layer that has received no elements.

        Returns:
            Layers that share their tensors with a layer that has received some.
        """
        received: set[int] = set()
        empty: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []
        for layer in self._layers:
            info = self._info(layer)
            if not info.can_load():
                received |= {id(each) for each in layer.parameters(recurse=False)}
                continue
            kernel = info.kernel_tensors[0]
            if info.load_numel > 0:
                received |= {id(each) for each in kernel.values()}
                continue
            loadable = info.restore_metadata[0].keys() - self._left_in_place
            if loadable & kernel.keys():
                empty.append((layer, {name: kernel[name] for name in loadable & kernel.keys()}))
            elif packed := self._packed(layer, info):
                self._fault(layer, min(packed), "received no elements")
            elif not (
                info.restore_metadata[0] or info.restore_metadata[1].keys() - unsaved_buffers(info)
            ):
                self._expect_nothing(info)  # a table of positions
        tied = []
        for layer, kernel in empty:
            alone = [name for name, tensor in kernel.items() if id(tensor) not in received]
            if alone:
                self._fault(layer, min(alone), "received no elements")
            else:
                self._expect_nothing(self._info(layer))
                tied.append(layer)
        return tied

    def _expect_nothing(self, info: Any) -> None:
        """Have vLLM not warn that a layer was not loaded: a checkpoint has nothing of its own."""
        info.load_numel_total = 0

    @property
    def _left_in_place(self) -> set[str]:
        """Names of tensors that vLLM's reload leaves where they are."""
        from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

        names: set[str] = SKIP_TENSORS
        return names


class _DirectCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes the copies that a model's loader makes itself, into parameters without memory.

    vLLM's reload defers copies by a parameter's weight loader. A loader that writes to the
    parameter itself would write to the meta device, and its weights would be lost.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched: dict[int, tuple[nn.Module, str]] = {}
        self._copies: dict[nn.Module, list[tuple[str, tuple[Any, ...], torch.Tensor]]] = {}
        self._numel: dict[nn.Module, int] = {}
        self._num_paused = 0

    def watch(self, parameter: torch.Tensor, layer: nn.Module, name: str) -> None:
        """Note copies into a parameter, and into views of it."""
        self._watched[parameter.untyped_storage()._cdata] = (layer, name)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing within."""
        self._num_paused += 1
        try:
            yield
        finally:
            self._num_paused -= 1

    def take_numel(self) -> list[tuple[nn.Module, int]]:
        """Return the number of elements that each layer has received since the last call."""
        taken, self._numel = list(self._numel.items()), {}
        return taken

    def replay(self, layer: nn.Module) -> None:
        """Make the copies into a layer, which has memory now."""
        for name, place, source in self._copies.pop(layer, ()):
            getattr(layer, name).data.as_strided(*place).copy_(source)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.copy_.default and not self._num_paused and args[0].is_meta:
            self._note(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _note(self, into: torch.Tensor, source: torch.Tensor) -> None:
        layer, name = self._watched.get(into.untyped_storage()._cdata, (None, ""))
        if layer is not None:
            place = (into.size(), into.stride(), into.storage_offset())
            self._copies.setdefault(layer, []).append((name, place, source))
            self._numel[layer] = self._numel.get(layer, 0) + into.numel()


def forget_parts(model: nn.Module) -> None:
    """Forget the elements that incomplete layers have received so far in a layerwise reload.

    Otherwise the end of the reload would complete them over memory that was never written, and a
    second load would count the first one's elements as its own.

    Args:
        model: The model, within a reload.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0


def unsaved_buffers(info: Any) -> set[str]:
    """Return the names of a layer's buffers that are no part of its state.

    Args:
        info: vLLM's state of the layer's reload.
    """
    names: set[str] = getattr(info, "kernel_non_persistent_buffers", set())
    return names


def listed(faults: list[Fault]) -> str:
    """Return a text that names the first faults."""
    more = len(faults) - MAX_LISTED
    return "; ".join(map(str, faults[:MAX_LISTED])) + (f"; and {more} more" if more > 0 else "")


@contextlib.contextmanager
def _keeping_scales() -> Iterator[None]:
    """Have each handler of oneDNN for quantised weights keep the scales that it points to.

    vLLM copies scales into the kernel's tensor, and frees the scales that the handler was made
    with: from then on the handler would read freed memory.
    """
    ops: Any = importlib.import_module("vllm._custom_ops")
    create = getattr(ops, "create_onednn_scaled_mm", None)
    if create is None:
        yield
        return

    def create_and_keep(weight: torch.Tensor, scales: torch.Tensor, *args: Any) -> Any:
        handler = create(weight, scales, *args)
        handler.scales = scales
        return handler

    ops.create_onednn_scaled_mm = create_and_keep
    try:
        yield
    finally:
        ops.create_onednn_scaled_mm = create


@contextlib.contextmanager
def _keeping_names(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Keep the parameters that are None, which vLLM deletes from a layer that is not processed."""
    empty = [
        (layer, name)
        for layer in layers
        for name, held in layer._parameters.items()
        if held is None
    ]
    try:
        yield
    finally:
        for layer, name in empty:
            layer._parameters.setdefault(name, None)


def _without_mtp_check() -> contextlib.AbstractContextManager[None]:
    """Accept that an update has no weights of heads that predict several tokens, as vLLM does."""
    if importlib.util.find_spec("vllm.model_executor.model_loader.mtp_validation") is None:
        return contextlib.nullcontext()
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    check: contextlib.AbstractContextManager[None] = disable_mtp_completeness_check()
    return check
