"""FlashInfer's wrapper for prefixes that requests share."""

from __future__ import annotations

from typing import Any

import torch

import tilewise as tw
from tilewise.adapters.flashinfer.paged import BatchPrefillWithPagedKVCacheWrapper
from tilewise.adapters.flashinfer.plan import (
    Cache,
    attend,
    integer,
    pool_of,
    refuse,
    same_dtype,
)
from tilewise.core.errors import InputError
from tilewise.core.flags import check_flags


class MultiLevelCascadeAttentionWrapper:
    """FlashInfer's wrapper for requests that share prefixes: attention over each level's pages, merged in float32."""

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[torch.Tensor] | None = None,
    ) -> None:
        check_flags(use_cuda_graph=use_cuda_graph)
        levels = range(integer("num_levels", num_levels, 1, "the last one holds what requests do not share"))
        arrays = (qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr)
        buffers = zip(*(_of_levels("buffers", x, num_levels) for x in arrays), strict=True) if use_cuda_graph else None
        rows = list(buffers) if buffers is not None else [() for _ in levels]
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *row) for row in rows
        ]
        self._kv_layout = kv_layout

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans are written into the tensors that were given at the start."""
        return self._levels[0].is_cuda_graph_enabled

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Any) -> None:
        """Nothing: workspaces are not used."""

    def end_forward(self) -> None:
        """Nothing: as in FlashInfer."""

    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """As the paged prefill wrapper's `plan`, with a list of one tensor for each level; all levels or none.

        `causal` is about the last level alone. A window or ALiBi would count from each level's own keys: refused where
        there is more than one.
        """
        check_flags(causal=causal, use_fp16_qk_reduction=use_fp16_qk_reduction)
        hint = "positions of one level say nothing about another's"
        if len(self._levels) > 1:
            refuse(hint, window_left=window_left if window_left >= 0 else None)
            refuse(hint, pos_encoding_mode=pos_encoding_mode if pos_encoding_mode == "ALIBI" else None)
        arrays = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        tables = zip(*(_of_levels(name, x, len(self._levels)) for name, x in arrays.items()), strict=True)
        dtype = same_dtype(q_data_type, kv_data_type, None)
        prepared = [
            level._prepare(
                table,
                (num_qo_heads, num_kv_heads, head_dim, head_dim, page_size),
                dtype,
                (None, None),
                causal=causal and level is self._levels[-1],
                pos_encoding_mode=pos_encoding_mode,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                sm_scale=sm_scale,
            )
            for level, table in zip(self._levels, tables, strict=True)
        ]
        for level, planned in zip(self._levels, prepared, strict=True):
            level._commit(*planned)

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: Cache) -> torch.Tensor:
        """Attention of q (tokens, num_qo_heads, head_dim) over all levels, in the dtype of q."""
        tensors = (q, *pool_of(paged_kv_cache, self._kv_layout))
        plans = [level._ready() for level in self._levels]
        states = [attend(planned, planned.variant, tensors) for planned in plans]
        return states[0][0] if len(states) == 1 else tw.merge(*states)[0]

    forward = run


def _of_levels(name: str, tensors: Any, levels: int) -> list[Any]:
    if not isinstance(tensors, (list, tuple)) or len(tensors) != levels:
        got = f"{len(tensors)} of them" if isinstance(tensors, (list, tuple)) else type(tensors).__name__
        raise InputError(name, got=got, expected=f"a list of {levels} tensors", hint="one for each level")
    return list(tensors)
