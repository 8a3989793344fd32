"""FlashInfer's wrappers and functions (package flashinfer), run by tilewise: same names, arguments and conventions.

The log-sum-exp has base 2 and shape (tokens, heads). Layouts NHD and HND, a paged cache as one tensor or as two, any
page size. `window_left` W leaves W + 1 keys visible. Workspaces are not used, except for their device, which is that of
the plan. `plan` waits for the GPU only with ALiBi or a custom mask, whose lengths it reads once. Beyond FlashInfer: the
CPU, float32, any head_dim up to 512, any number of query heads for each key/value head.

Not supported, with an error that names the argument: ROPE_LLAMA, keys and values of 8 bits and fewer, scales that are
tensors, `jit_args`, multi-item scoring, several queries for each request in a decode wrapper, custom masks or ALiBi
with buffers for CUDA graphs. `fixed_split_size` and `disable_split_kv` become `batch_invariant=True`, and are refused
over packed keys on a GPU. Arguments that only select FlashInfer's kernels (`backend`, `use_tensor_cores`, ...) have no
effect.
Source: Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving" (2025).
"""

from __future__ import annotations

from tilewise.adapters.flashinfer.cascade import MultiLevelCascadeAttentionWrapper
from tilewise.adapters.flashinfer.functions import (
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from tilewise.adapters.flashinfer.mixed import BatchAttention
from tilewise.adapters.flashinfer.paged import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from tilewise.adapters.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from tilewise.adapters.flashinfer.states import merge_state, merge_state_in_place, merge_states

__all__ = [
    "BatchAttention",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
