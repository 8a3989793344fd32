"""FlashInfer's wrappers over a paged cache: decode, prefill, and both together."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch

from tilewise.adapters.flashinfer.plan import (
    Cache,
    Planned,
    State,
    any_batch,
    custom_mask_of,
    heads_of,
    indices_of,
    indptr_of,
    integer,
    number,
    page_lengths,
    pool_of,
    refuse,
    same_dtype,
    tail_of,
    variant_of,
)
from tilewise.adapters.flashinfer.wrapper import PLAN_REFUSED, PLAN_STEERING, PagedWrapper
from tilewise.core.errors import InputError
from tilewise.core.flags import check_flags
from tilewise.layouts import Paged


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """FlashInfer's wrapper for one new token of each request; `use_tensor_cores` and `backend` change nothing."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        check_flags(use_tensor_cores=use_tensor_cores)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, jit_args)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = None,
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        **options: Any,
    ) -> None:
        """Keep what the runs of a batch have in common; a plan that fails leaves the one before.

        Args:
            indptr: int32 (batch + 1,): request r has pages indices[indptr[r]:indptr[r + 1]].
            last_page_len: int32 (batch,): tokens in each request's last page.
            pos_encoding_mode: "NONE" or "ALIBI". logits_soft_cap: None and 0 are none.
            q_data_type: float16 unless `data_type` says otherwise; keys and output have the same.
            options: fixed_split_size and disable_split_kv give each request the bits that it has alone
                (`tilewise.attention(batch_invariant=True)`); rope_scale, rope_theta and what else steers FlashInfer's
                kernels are taken; others are refused or errors.
        """
        each = options.pop("q_len_per_req", 1)
        refuse("several queries for each request are a prefill", q_len_per_req=None if each in (None, 1) else each)
        tail_of("plan", options, steering=PLAN_STEERING, refused=())
        q_data_type = q_data_type or data_type or "float16"
        heads_of(num_qo_heads, num_kv_heads, head_dim)
        *values, seqlens = self._table(indptr, indices, last_page_len, page_size)
        self._no_graph(pos_encoding_mode)
        variant = variant_of(
            head_dim,
            num_qo_heads,
            self.device,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            keys=seqlens,
        )
        dtype = same_dtype(q_data_type, kv_data_type or data_type, o_data_type)
        self._check_fit(values)
        layout = self._layout(values, seqlens)
        alone = any_batch(options, True, self.device)
        planned = Planned(layout, variant, num_kv_heads, head_dim, head_dim, dtype, page_size, alone)
        self._commit(planned, values, seqlens)

    begin_forward = plan

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """`run` with a variant of its own: as in FlashInfer these arguments replace the plan's, defaults too."""
        variant = self._variant(
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )
        given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "return_lse": return_lse}
        return self._run((q, *pool_of(paged_kv_cache, self._kv_layout)), (), given, variant)

    forward_return_lse = partialmethod(forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The decode wrapper with buffers into which every plan is written."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        buffers = (indptr_buffer, indices_buffer, last_page_len_buffer)
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, *buffers)


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """FlashInfer's wrapper for any number of new tokens of each request, keys in pages."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        refuse("a custom mask lies in one plan", custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf)
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, jit_args or jit_kwargs)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
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
        o_data_type: str | torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """As the decode wrapper's `plan`, for tokens qo_indptr[r] to qo_indptr[r + 1] of request r.

        Args:
            custom_mask: bool, each request's (seqlen_q, seqlen_k) flattened, in turn; replaces `causal`.
            packed_custom_mask: the same as uint8 bits, little end first, each request from a whole byte.
            causal: the last token of a request stands at its last key.
        """
        check_flags(use_fp16_qk_reduction=use_fp16_qk_reduction)
        tail_of("plan", options, steering=PLAN_STEERING, refused=PLAN_REFUSED)
        self._commit(
            *self._prepare(
                (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
                (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk, page_size),
                same_dtype(q_data_type, kv_data_type, o_data_type),
                (custom_mask, packed_custom_mask),
                any_batch(options, True, self.device),
                causal=causal,
                pos_encoding_mode=pos_encoding_mode,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                sm_scale=sm_scale,
            )
        )

    begin_forward = plan

    def _prepare(
        self,
        table: tuple[Any, ...],
        sizes: tuple[Any, ...],
        dtype: torch.dtype,
        masks: tuple[Any, Any],
        alone: bool = False,
        **variant: Any,
    ) -> tuple[Planned, tuple[torch.Tensor, ...], torch.Tensor]:
        """A plan, its index tensors and lengths, all checked and nothing changed."""
        heads_q, heads_kv, head_dim, head_dim_v, page_size = sizes
        heads_of(heads_q, heads_kv, head_dim, head_dim_v)
        starts = indptr_of("qo_indptr", table[0], self.device)
        _, indptr, indices, last_page_len = table
        *pages, seqlens = self._table(indptr, indices, last_page_len, page_size, starts.shape[0] - 1)
        values, queries = (starts, *pages), starts[1:] - starts[:-1]
        self._no_graph(variant["pos_encoding_mode"], *masks)
        known = None
        if all(x.device.type == "cpu" for x in (table[0], indptr, last_page_len)):
            known = table[0].diff(), page_lengths(indptr, last_page_len, page_size)
        custom = custom_mask_of(*masks, (queries, seqlens), self.device, known)
        made = variant_of(head_dim, heads_q, self.device, queries=queries, keys=seqlens, custom=custom, **variant)
        self._check_fit(values)
        layout = self._layout(values, seqlens)
        return Planned(layout, made, heads_kv, head_dim, head_dim_v, dtype, page_size, alone), values, seqlens

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """`run` with a variant of its own: as in FlashInfer these arguments replace the plan's, defaults too."""
        check_flags(use_fp16_qk_reduction=use_fp16_qk_reduction)
        variant = self._variant(
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )
        given = {"k_scale": k_scale, "v_scale": v_scale, "return_lse": return_lse}
        return self._run((q, *pool_of(paged_kv_cache, self._kv_layout)), (), given, variant)

    forward_return_lse = partialmethod(forward, return_lse=True)


class BatchAttention(PagedWrapper):
    """FlashInfer's wrapper for prefills and decodes together: tokens and lengths as they are, both results always."""

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
        """As the paged prefill wrapper's `plan`, with the requests' lengths (batch,) in place of last_page_len."""
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
        """(out, lse) of the planned batch; a soft cap above 0 replaces the plan's, which must have one."""
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
