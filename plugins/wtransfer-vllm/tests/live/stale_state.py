"""Faults of a vLLM that keeps state beside its parameters, which a reload forgets.

A plug-in of vLLM (`install` makes it one). Each fault leaves every parameter as it should be, in a
proof as well as in an update; only what the model computes is wrong.
"""

import os
from pathlib import Path

from torch import nn

VARIABLE = "STALE_STATE"


def install(folder, fault):
    """Return the environment of engines that have a fault."""
    info = Path(folder) / "stale_state-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stale-state\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nstale_state = stale_state:register\n"
    )
    path = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path)), VARIABLE: fault}


def packed_copy_of_a_tied_head():
    """A head has a packed copy of the tensor that it shares with the embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from wtransfer_vllm import reload

    def process_weights_after_loading(self, layer):
        layer.packed = layer.weight.detach().clone()

    def apply(self, layer, x, bias=None):
        return nn.functional.linear(x, layer.packed, bias)

    UnquantizedEmbeddingMethod.process_weights_after_loading = process_weights_after_loading
    UnquantizedEmbeddingMethod.apply = apply
    # What our own reload does about such heads.
    reload.Reload._finish = lambda self, tied: None


def scale_in_an_attribute():
    """A linear layer has a number that was derived from its first weights."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    process = UnquantizedLinearMethod.process_weights_after_loading
    apply = UnquantizedLinearMethod.apply

    def process_weights_after_loading(self, layer):
        if not hasattr(layer, "widest"):
            layer.widest = float(layer.weight.abs().max())
        process(self, layer)

    def apply_scaled(self, layer, x, bias=None):
        return apply(self, layer, x, bias) * layer.widest

    UnquantizedLinearMethod.process_weights_after_loading = process_weights_after_loading
    UnquantizedLinearMethod.apply = apply_scaled


def tensor_in_an_attribute():
    """An embedding has a table that was made of its first weights, and is no buffer."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def embedding(self, layer, tokens):
        if not hasattr(layer, "table"):
            layer.table = layer.weight.detach() * 2
        return nn.functional.embedding(tokens, layer.table)

    UnquantizedEmbeddingMethod.embedding = embedding


def packed_closure():
    """A linear layer's kernel has its packed weight in a closure that is made once."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    process = UnquantizedLinearMethod.process_weights_after_loading

    def process_weights_after_loading(self, layer):
        packed, first = layer.weight.detach().clone(), getattr(layer, "cpu_linear", None)
        process(self, layer)
        layer.cpu_linear = first or (lambda x, weight, bias: nn.functional.linear(x, packed, bias))

    UnquantizedLinearMethod.process_weights_after_loading = process_weights_after_loading


def scale_that_is_applied_again():
    """Attention multiplies its scale whenever its layer is processed."""
    from vllm.model_executor.layers.attention import Attention

    process = Attention.process_weights_after_loading

    def process_weights_after_loading(self, act_dtype):
        process(self, act_dtype)
        self.impl.scale *= 0.5

    Attention.process_weights_after_loading = process_weights_after_loading


def register():
    """Put the fault in place, in each process of vLLM, before its model is made."""
    if fault := os.environ.get(VARIABLE):
        globals()[fault]()
