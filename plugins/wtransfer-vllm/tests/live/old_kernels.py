"""What an old vLLM's compiled part would do for a small Llama on a CPU, in torch's own words.

That part is built against one version of torch and does not load beside another. All else of vLLM
is in Python, and runs as it is: engine core, scheduler, worker, model, loader and reload. Import
this before vLLM; leave out layers' own kernels by ``custom_ops=["none"]``.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

library = torch.library.Library("_C", "DEF")
library.define(
    "get_scheduler_metadata(int num_reqs, int heads, int kv_heads, int head_dim, Tensor seq_lens, "
    "ScalarType dtype, Tensor query_start_loc, bool causal, int window, str isa, bool split) "
    "-> Tensor"
)
library.define(
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor slot_mapping, str isa) -> ()"
)
library.define(
    "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache, "
    "Tensor(a!) output, Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, "
    "Tensor? alibi, int left, int right, Tensor block_table, float softcap, Tensor metadata, "
    "Tensor? sinks) -> ()"
)


def get_scheduler_metadata(*_plan):
    return torch.empty(0)


def cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, _isa):
    """Put tokens into their slots; caches are (block, head, place in block, dim)."""
    size = key_cache.shape[2]
    for count, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // size, :, slot % size] = key[count]
            value_cache[slot // size, :, slot % size] = value[count]


def cpu_attention_with_kv_cache(query, key_cache, value_cache, output, query_start_loc, *more):
    """Let the last tokens of each request look at all of its tokens in the cache."""
    seq_lens, scale, causal, _alibi, _left, _right, block_table, *_ = more
    starts = query_start_loc.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        begin, end = starts[request], starts[request + 1]
        blocks = block_table[request, : -(-length // key_cache.shape[2])].long()
        asked = torch.arange(length - (end - begin), length)
        seen = torch.arange(length)[None] <= asked[:, None] if causal else None
        output[begin:end] = scaled_dot_product_attention(
            query[begin:end].transpose(0, 1)[None],
            _tokens(key_cache, blocks, length),
            _tokens(value_cache, blocks, length),
            attn_mask=seen,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)


def _tokens(cache, blocks, length):
    """Return a request's part of a cache as (1, head, token, dim)."""
    return cache[blocks].transpose(0, 1).flatten(1, 2)[None, :, :length]


for kernel in (get_scheduler_metadata, cpu_attn_reshape_and_cache, cpu_attention_with_kv_cache):
    library.impl(kernel.__name__, kernel, "CompositeExplicitAutograd")

# What vLLM asks torch about the processor, under names that torch has given up since. The answers
# choose among compiled kernels; there are none.
for question in ("_is_avx512_supported", "_is_amx_tile_supported"):
    if not hasattr(torch._C._cpu, question):
        setattr(torch._C._cpu, question, bool)
