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
    """FlashInfer's wrapper for requests that share prefixes: attention over each level's pages, merged in float32.

    Args:
        num_levels: levels of the cascade; the last one holds what requests do not share.
        float_workspace_buffer: any tensor on the device of the plans; one byte is enough.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: if True, every plan is written into the buffers below, for graphs that read them.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr: a list of
            one int32 tensor for each level; needed only with `use_cuda_graph`.

    Raises:
        InputError: an argument is wrong, or `use_cuda_graph` without buffers for each level.

    Example:
        >>> import tilewise.adapters.flashinfer as flashinfer
        >>> cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(1))
        >>> ends, own = torch.tensor([0, 2]), torch.tensor([0, 1, 2])  # two queries share page 7, then have 2 and 5
        >>> lists = [ends, own], [torch.tensor([0, 1]), own], [torch.tensor([7]), torch.tensor([2, 5])]
        >>> last = [torch.tensor([16]), torch.tensor([3, 9])]
        >>> cascade.plan(*lists, last, 4, 2, 16, 16, q_data_type=torch.float32)
        >>> out = cascade.run(torch.randn(2, 4, 16), torch.randn(8, 2, 16, 2, 16))
    """

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
        """Whether plans are written into the buffers that the constructor got."""
        return self._levels[0].is_cuda_graph_enabled

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Any) -> None:
        """Does nothing: workspaces are not used.

        Args:
            float_workspace_buffer, int_workspace_buffers: ignored.
        """

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

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
        """As the paged prefill wrapper's `plan`, with a list of one tensor for each level.

        If it raises an error, the previous plan of all levels stays valid.

        Args:
            qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len: lists of tensors, as
                qo_indptr, paged_kv_indptr, paged_kv_indices and paged_kv_last_page_len there.
            num_qo_heads, num_kv_heads, head_dim, page_size, sm_scale, logits_soft_cap, q_data_type, kv_data_type: as
                there.
            causal: hides keys of the last level only; all others are before the queries.
            pos_encoding_mode, window_left: with more than one level "NONE" and -1, because positions would count from
                the first key of each level.
            use_fp16_qk_reduction, rope_scale, rope_theta: accepted, and not used.

        Raises:
            InputError: an argument is wrong.
            UnsupportedError: a window or ALiBi over several levels, or what the paged prefill wrapper does not support.
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
        """Attention over all levels.

        Args:
            q: (tokens, num_qo_heads, head_dim).
            paged_kv_cache: (pages, 2, page_size, num_kv_heads, head_dim), or a tuple of k and v without the 2; in
                layout HND heads come before page_size.

        Returns:
            out (tokens, num_qo_heads, head_dim), in the dtype of q.

        Raises:
            InputError: run before plan, or a tensor is not as planned.
        """
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
