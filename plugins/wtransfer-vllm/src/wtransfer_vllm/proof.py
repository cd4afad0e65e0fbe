"""Prove that vLLM's reload gives the weights that it was given, before an update relies on it.

The reload of the weights that vLLM serves must give the weights that it serves. The reload goes
into stand-ins for the kernels' tensors, layer by layer, and leaves the model as it was.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

from wtransfer_vllm.reload import Reload, ReloadError, listed, unsaved_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

PROBE_ROWS = 16
"""Rows of the input by which a layer is compared whose weight is in none of its parameters."""
UNREAD = frozenset({"weight_shape", "w13_weight_shape", "w2_weight_shape"})
"""Parameters that no kernel reads: shapes of weights before compressed-tensors packed them. A fused
layer has that of the part that was loaded last."""
UNWRITTEN = 0xA5
"""Byte of memory that no loader has written to."""


def prove(
    model: nn.Module, vllm_config: Any, weights: Iterable[tuple[str, torch.Tensor]] | None
) -> None:
    """Raise unless the reload of the weights that a model serves gives these weights, bit for bit.

    vLLM's own code runs, up to and with its copy into the kernels' tensors. The copy goes, layer by
    layer, into stand-ins with every bit inverted, which must then equal the kernels' tensors. A
    layer that has no parameter any more once its weight is packed (on CPUs) is compared by its
    output. The model is not written to, and serves the same before and after.

    Weights kept in other state are not seen: `wtransfer_vllm.check` compares tokens.

    Args:
        model: The model. No step of it may run meanwhile.
        vllm_config: vLLM's own.
        weights: The served weights, in the form of the checkpoint; None: vLLM's dummy weights,
            which are the same at every load.

    Raises:
        ReloadError: The reload does not; the text names layer, parameter and cause.

    Cost: one reading of the weights and three passes over the memory of each layer; memory for one
        layer, as the checkpoint and twice as its kernel has it.
    """
    proof, error = _Proof(model, vllm_config, of_dummies=weights is None), None
    try:
        proof.run(weights or ())
    except Exception as raised:
        error = raised
    if error is None:
        return
    quantisation = getattr(vllm_config.model_config, "quantization", None)
    what = f"{type(model).__name__} ({quantisation or 'not quantised'})"
    # A load that breaks off leaves layers at fault: the cause is its own error.
    if isinstance(error, ReloadError):
        why = f"vLLM's reload of the weights that it serves gives others: {listed(proof.faults)}"
    else:
        why = f"vLLM cannot reload the weights that it serves: {type(error).__name__}: {error}"
    raise ReloadError(
        f"{what} takes no update, for {why}. Nothing was changed, and vLLM serves on; other "
        "weights need a restart"
    ) from error


class _Proof(Reload):
    """A reload into stand-ins for the kernels' tensors.

    Args:
        model: The model.
        vllm_config: vLLM's own.
        of_dummies: True if the weights are those of vLLM's load format ``dummy``.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, *, of_dummies: bool) -> None:
        super().__init__(model, vllm_config)
        self._of_dummies = of_dummies
        self._stand_ins = _StandIns()
        self._in_place: dict[tuple[nn.Module, str], torch.Tensor] = {}
        self._made_in_place: dict[tuple[nn.Module, str], torch.Tensor | None] = {}
        self._freed: list[tuple[nn.Module, str, torch.Tensor]] = []

    def _prepare(self) -> None:
        super()._prepare()
        # Loaders write to these tensors at once: to a stand-in that all layers of a tensor share.
        self._in_place = {
            (layer, name): tensor
            for layer in self._layers
            for name, tensor in self._vllm.get_layer_tensors(layer).items()
            if name in self._left_in_place and not tensor.is_meta
        }
        stand_ins = _StandIns()
        stand_ins.begin(self._in_place.values())
        made: dict[int, torch.Tensor] = {}
        for (layer, name), tensor in self._in_place.items():
            if id(tensor) not in made:
                made[id(tensor)] = stand_ins.make(tensor, inverted=name in layer._parameters)
            setattr(layer, name, made[id(tensor)])

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self._of_dummies:
            super()._load(weights)
            self._look_in_place(self._in_place)
            return
        for layer in self._layers:
            info = self._info(layer)
            if info.can_load() and not self._vllm.is_deferred_attention_layer(layer):
                self._vllm._layerwise_process(layer, info)

    def _look_in_place(self, places: Iterable[tuple[nn.Module, str]]) -> None:
        """Note the tensors that a loader writes to, or has made anew: for one layer of them.

        In a layer that was processed the serving ones are back.
        """
        for layer, name in places:
            made = getattr(layer, name, None)
            if made is not self._in_place[layer, name]:
                self._made_in_place[layer, name] = made

    def _process(
        self, process: Callable[..., None], layer: nn.Module, info: Any, *args: Any
    ) -> None:
        self._look_in_place([each for each in self._in_place if each[0] is layer])
        kernel, unsaved = info.kernel_tensors, unsaved_buffers(info)
        packed = self._packed(layer, info)
        # Tensors of an attention layer are kept, or made of what other layers have.
        keeps = bool(args)
        self._stand_ins.begin(tensor for tensors in kernel for tensor in tensors.values())
        stand_ins = tuple(
            {
                name: self._stand_ins.make(tensor, inverted=not keeps and name not in unsaved)
                for name, tensor in tensors.items()
            }
            for tensors in kernel
        )
        state = _State(layer)
        info.kernel_tensors = stand_ins
        fault, answer, kept = None, None, {}
        try:
            process(layer, info, *args)
            kept = {n: t for n, t in stand_ins[0].items() if t.numel() and not kernel[0][n].numel()}
            for made, serving in zip(stand_ins, kernel, strict=True):
                for name in serving.keys() - self._left_in_place - kept.keys() - UNREAD:
                    if not _same_bits(made[name], serving[name]):
                        fault = (name, "other bits than the kernel's")
            if fault is None and packed - kept.keys():
                answer = _answer(layer)
        except Exception as error:
            fault = (None, f"{type(error).__name__}: {error}")
        finally:
            state.restore()
            self._place(layer, info, kernel, unsaved)
        if answer is not None and not _same_bits(answer, _answer(layer)):
            fault = (min(packed - kept.keys()), "packed for its kernel, it gives other answers")
        for name, tensor in kept.items():
            # For the layer that packs it; see `_keep_freed`.
            self._freed.append((layer, name, kernel[0][name]))
            setattr(layer, name, tensor)
        if fault is not None:
            self._fault(layer, *fault)

    def _fill(self, tensor: torch.Tensor) -> None:
        if self._of_dummies:
            from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

            initialize_single_dummy_weight(tensor)
        else:
            # Memory that was freed may hold the very weights that a loader leaves out.
            _memory_of(tensor).fill_(UNWRITTEN)

    def _finish(self, tied: list[nn.Module]) -> None:  # noqa: ARG002  # packed copies are not seen
        for (layer, name), tensor in self._in_place.items():
            made = self._made_in_place.get((layer, name))
            if not self._of_dummies and not _same_bits(tensor, made):
                self._fault(layer, name, "other bits than those that serve")
            setattr(layer, name, tensor)
        for layer, name, kernel in self._freed:
            if getattr(layer, name).numel():
                self._fault(layer, name, "not processed as at the first load")
            setattr(layer, name, kernel)


class _State:
    """State of a layer, its methods and their kernels beside parameters and buffers.

    Processing puts packed weights there, made of the loaded weights. So the state is put back.
    """

    DEPTH = 3
    """Layer, its quantisation method, the method's kernel."""

    def __init__(self, layer: nn.Module) -> None:
        self._held: dict[int, tuple[Any, dict[str, Any]]] = {}
        owners: list[Any] = [layer]
        for _ in range(self.DEPTH):
            found: list[Any] = []
            for owner in owners:
                if id(owner) not in self._held:
                    self._held[id(owner)] = (owner, dict(vars(owner)))
                    found += filter(_may_hold_weights, vars(owner).values())
            owners = found

    def restore(self) -> None:
        """Put everything back."""
        for owner, held in self._held.values():
            now = vars(owner)
            for name in now.keys() - held.keys():
                del now[name]
            now.update(held)


def _may_hold_weights(value: object) -> bool:
    """Return whether a value is an object with attributes, and no layer, tensor, class or code."""
    others = (torch.nn.Module, torch.Tensor, type, types.FunctionType, types.ModuleType)
    return type(value).__dictoffset__ != 0 and not isinstance(value, others)


class _StandIns:
    """Makes stand-ins for tensors of one layer after the other, in the same memory.

    Touching fresh memory takes ten times as long as copying.
    """

    ALIGNMENT = 64

    def __init__(self) -> None:
        self._memory: dict[torch.device, torch.Tensor] = {}
        self._used: dict[torch.device, int] = {}

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give up the earlier stand-ins, and make room for one of each of these tensors."""
        self._used.clear()
        wanted: dict[torch.device, int] = {}
        for tensor in tensors:
            wanted[tensor.device] = wanted.get(tensor.device, 0) + self._room(tensor)
        for device, nbytes in wanted.items():
            if device not in self._memory or self._memory[device].numel() < nbytes:
                self._memory[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _room(self, tensor: torch.Tensor) -> int:
        return -(-_span(tensor) // self.ALIGNMENT) * self.ALIGNMENT

    def make(self, tensor: torch.Tensor, *, inverted: bool) -> torch.Tensor:
        """Return a tensor of the same kind and bytes; `inverted`: with every bit wrong."""
        device = tensor.device
        begin = self._used.get(device, 0)
        self._used[device] = begin + self._room(tensor)
        memory = self._memory[device][begin : self._used[device]]
        whole = memory[: _span(tensor)].view(tensor.dtype)
        stand_in = whole.as_strided(tensor.size(), tensor.stride())
        stand_in.copy_(tensor.data)
        if inverted:
            memory.bitwise_not_()
        # As vLLM itself makes one of a class that has no constructor for it.
        stand_in.__class__ = tensor.__class__
        stand_in.__dict__ = tensor.__dict__.copy()
        return stand_in


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to behind the last."""
    if not tensor.numel():
        return 0
    dims = zip(tensor.size(), tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in dims)) * tensor.element_size()


def _answer(layer: nn.Module) -> torch.Tensor:
    """Return the output of a linear layer for an input that is always the same.

    Raises:
        ReloadError: The layer is of another kind.
    """
    method: Any = getattr(layer, "quant_method", None)
    dtype = getattr(layer, "params_dtype", None)
    width = getattr(layer, "input_size_per_partition", getattr(layer, "input_size", None))
    if method is None or width is None or dtype is None:
        raise ReloadError("its weight is in none of its tensors, and cannot be compared")
    rows = torch.randn(PROBE_ROWS, width, generator=torch.Generator().manual_seed(0))
    answer: torch.Tensor = method.apply(layer, rows.to(dtype))
    return answer


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor that is alone in its memory."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.data.untyped_storage())


def _same_bits(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    if other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor; in words where possible, which compare faster."""
    flat = tensor.data.contiguous().flatten()
    words = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
    return flat.view(torch.int64 if words else torch.uint8)
