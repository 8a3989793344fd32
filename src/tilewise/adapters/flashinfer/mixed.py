"""FlashInfer's wrapper for prefills and decodes together."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.adapters.flashinfer.plan import (
    Cache,
    Planned,
    State,
    heads_of,
    indices_of,
    indptr_of,
    integer,
    number,
    pool_of,
    refuse,
    same_dtype,
    variant_of,
)
from tilewise.adapters.flashinfer.wrapper import PagedWrapper
from tilewise.core.errors import InputError
from tilewise.core.flags import check_flags
from tilewise.layouts import Paged


class BatchAttention(PagedWrapper):
    """FlashInfer's wrapper for prefills and decodes in one batch; it always returns both out and lse.

    Args:
        kv_layout: "NHD" or "HND".
        device: of the plans.

    Raises:
        InputError: an unknown layout.

    Example:
        >>> import tilewise.adapters.flashinfer as flashinfer
        >>> attention = flashinfer.BatchAttention(device="cpu")
        >>> queries, ends = torch.tensor([0, 5, 6]), torch.tensor([0, 2, 3])  # five queries, and one that decodes
        >>> table, dtypes = (ends, torch.tensor([7, 2, 5]), torch.tensor([29, 8])), (torch.float32, torch.float32)
        >>> attention.plan(queries, *table, 4, 2, 16, 16, 16, True, None, None, *dtypes)
        >>> out, lse = attention.run(torch.randn(6, 4, 16), torch.randn(8, 2, 16, 2, 16))
    """

    def __init__(self, kv_layout: str = "NHD", device: torch.device | str = "cuda") -> None:
        super().__init__(torch.empty(0, device=device), kv_layout, False, (), None)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """As the paged prefill wrapper's `plan`, with numbers of keys instead of last_page_len.

        Args:
            qo_indptr, kv_indptr, kv_indices: as qo_indptr, paged_kv_indptr and paged_kv_indices there.
            kv_len_arr: int32 or int64 (batch,), the number of keys of each request.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, causal, sm_scale, logits_soft_cap: as
                there.
            q_data_type, kv_data_type: one dtype for both.
            use_profiler: must be False.

        Raises:
            InputError: an argument is wrong.
            UnsupportedError: `use_profiler`.
        """
        check_flags(use_profiler=use_profiler)
        refuse("not offered by this adapter", use_profiler=use_profiler)
        heads_of(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        integer("page_size", page_size, 1, "tokens in a page")
        starts = indptr_of("qo_indptr", qo_indptr, self.device)
        batch = starts.shape[0] - 1
        first = indptr_of("kv_indptr", kv_indptr, self.device, batch)
        pages = indices_of("kv_indices", kv_indices, self.device)
        seqlens = indices_of("kv_len_arr", kv_len_arr, self.device, batch)
        variant = variant_of(
            head_dim_qk, num_qo_heads, self.device, causal=causal, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap
        )
        dtype = same_dtype(q_data_type, kv_data_type, None)
        layout = Paged((first, pages), seqlens, starts)
        self._planned = Planned(layout, variant, num_kv_heads, head_dim_qk, head_dim_vo, dtype, page_size)

    begin_forward = plan

    def run(  # type: ignore[override]
        self,
        q: torch.Tensor,
        kv_cache: Cache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        **options: Any,
    ) -> State:
        """Attention of the planned batch.

        Args:
            q: (tokens, num_qo_heads, head_dim_qk).
            kv_cache: (pages, 2, page_size, num_kv_heads, head_dim), or a tuple of k and v without the 2; in layout HND
                heads come before page_size.
            out, lse: tensors that take the results.
            k_scale, v_scale: numbers that multiply the scores, and the output.
            logits_soft_cap: above 0 it replaces the soft cap of the plan, which must have one.
            profiler_buffer: must be None.
            options: as in the other wrappers.

        Returns:
            (out, lse): (tokens, num_qo_heads, head_dim_vo) and (tokens, num_qo_heads), base 2.

        Raises:
            InputError: run before plan, or a tensor is not as planned.
            UnsupportedError: an argument that tilewise does not support.
        """
        refuse("not offered by this adapter", profiler_buffer=profiler_buffer)
        variant, soft_cap = self._ready().variant, number("logits_soft_cap", logits_soft_cap)
        if soft_cap > 0 and not variant.soft_cap:
            hint = "plan(..., logits_soft_cap=...) says that there is one"
            raise InputError("logits_soft_cap", got=soft_cap, expected="0.0, as planned", hint=hint)
        if soft_cap > 0:
            variant = self._variant(causal=variant.causal, sm_scale=variant.scale, logits_soft_cap=soft_cap)
        given = dict(options, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=True)
        state: State = self._run((q, *pool_of(kv_cache, self._kv_layout)), (), given, variant)
        return state

    forward = run
