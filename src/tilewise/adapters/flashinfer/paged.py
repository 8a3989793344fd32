"""FlashInfer's wrappers over a paged cache: decode and prefill."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch

from tilewise.adapters.flashinfer.plan import (
    Cache,
    Planned,
    any_batch,
    custom_mask_of,
    heads_of,
    indptr_of,
    page_lengths,
    pool_of,
    refuse,
    same_dtype,
    tail_of,
    variant_of,
)
from tilewise.adapters.flashinfer.wrapper import PLAN_REFUSED, PLAN_STEERING, PagedWrapper
from tilewise.core.flags import check_flags


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """FlashInfer's wrapper for one new token of each request.

    Args:
        float_workspace_buffer: any tensor on the device of the plans; one byte is enough.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: if True, every plan is written into the buffers below, for graphs that read them.
        use_tensor_cores, backend: accepted, and not used.
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: int32 tensors, as large as the
            largest plan; needed only with `use_cuda_graph`.
        jit_args: must be None.

    Raises:
        InputError: an argument is wrong, or `use_cuda_graph` without buffers.
        UnsupportedError: `jit_args`.

    Example:
        >>> import tilewise.adapters.flashinfer as flashinfer
        >>> cache = torch.randn(8, 2, 16, 2, 16)  # (pages, k and v, page_size, num_kv_heads, head_dim)
        >>> decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
        >>> indptr, pages, last = torch.tensor([0, 2, 3]), torch.tensor([7, 2, 5]), torch.tensor([13, 8])
        >>> decode.plan(indptr, pages, last, 4, 2, 16, 16, q_data_type=torch.float32)
        >>> out = decode.run(torch.randn(2, 4, 16), cache)
    """

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
        """Keep what the runs of a batch have in common. If it raises an error, the previous plan stays valid.

        Args:
            indptr, indices: int32 or int64 (batch + 1,) and (pages,): request r has pages
                indices[indptr[r]:indptr[r + 1]].
            last_page_len: int32 or int64 (batch,): tokens in each request's last page.
            num_qo_heads, num_kv_heads, head_dim, page_size: sizes; num_kv_heads divides num_qo_heads.
            pos_encoding_mode: "NONE" or "ALIBI".
            window_left: W leaves W + 1 keys visible; -1 is no limit.
            logits_soft_cap: scores become cap * tanh(score / cap); None and 0 are none.
            q_data_type, kv_data_type, o_data_type, data_type: one dtype for all; None is float16.
            sm_scale: factor of q k^T; None is head_dim ** -0.5.
            options: with fixed_split_size or disable_split_kv a request has the same bits as if it were alone
                (`tilewise.attention(batch_invariant=True)`). rope_scale, rope_theta and arguments that select
                FlashInfer's kernels have no effect; others raise an error.

        Raises:
            InputError: an argument is wrong; values of index tensors are checked on a CPU.
            UnsupportedError: an argument that tilewise does not support.
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
        """`run` with options of its own: as in FlashInfer they replace those of the plan, also by their defaults.

        Args:
            q, paged_kv_cache, q_scale, k_scale, v_scale, return_lse: as in `run`.
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale: as in `plan`.
            rope_scale, rope_theta: accepted, and not used.

        Returns: as `run`.

        Raises:
            InputError, UnsupportedError: as `run`.
        """
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
    """The decode wrapper with buffers for CUDA graphs, into which every plan is written.

    Args:
        workspace_buffer: any tensor on the device of the plans; one byte is enough.
        indptr_buffer, indices_buffer, last_page_len_buffer: int32 tensors, as large as the largest plan.
        kv_layout: "NHD" or "HND".
        use_tensor_cores: accepted, and not used.

    Raises:
        InputError: an argument is wrong.

    Example:
        >>> import tilewise.adapters.flashinfer as flashinfer
        >>> buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 8, 2)]  # two requests, up to eight pages
        >>> decode = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(torch.empty(1), *buffers)
        >>> decode.is_cuda_graph_enabled
        True
    """

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
    """FlashInfer's wrapper for any number of new tokens of each request, keys in pages.

    Args:
        float_workspace_buffer: any tensor on the device of the plans; one byte is enough.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: if True, every plan is written into the buffers below, for graphs that read them.
        qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf: int32 tensors, as large as
            the largest plan; needed only with `use_cuda_graph`.
        custom_mask_buf, mask_indptr_buf, jit_args, jit_kwargs: must be None.
        backend: accepted, and not used.

    Raises:
        InputError: an argument is wrong, or `use_cuda_graph` without buffers.
        UnsupportedError: an argument that must be None.

    Example:
        >>> import tilewise.adapters.flashinfer as flashinfer
        >>> prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1))
        >>> queries, indptr = torch.tensor([0, 5, 7]), torch.tensor([0, 2, 3])
        >>> table = indptr, torch.tensor([7, 2, 5]), torch.tensor([13, 8])
        >>> prefill.plan(queries, *table, 4, 2, 16, 16, causal=True, q_data_type=torch.float32)
        >>> out = prefill.run(torch.randn(7, 4, 16), torch.randn(8, 2, 16, 2, 16))
    """

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
        """As the decode wrapper's `plan`, where request r has the queries qo_indptr[r] to qo_indptr[r + 1] - 1.

        Args:
            qo_indptr: int32 or int64 (batch + 1,), cumulative numbers of queries.
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len: as indptr, indices and last_page_len there.
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, pos_encoding_mode, sm_scale, window_left,
                logits_soft_cap, q_data_type, kv_data_type, o_data_type, options: as there.
            head_dim_vo: of values; None is head_dim_qk.
            custom_mask: bool, each request's (seqlen_q, seqlen_k) flattened, concatenated; replaces `causal`.
            packed_custom_mask: the same as uint8 bits, lowest bit first; each request begins at a byte.
            causal: the last query of a request has the position of its last key.
            use_fp16_qk_reduction, rope_scale, rope_theta: accepted, and not used.

        Raises:
            InputError, UnsupportedError: as there.
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
        """`run` with options of its own: as in FlashInfer they replace those of the plan, also by their defaults.

        Args:
            q, paged_kv_cache, k_scale, v_scale, return_lse: as in `run`.
            causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale: as in `plan`.
            use_fp16_qk_reduction, rope_scale, rope_theta: accepted, and not used.

        Returns: as `run`.

        Raises:
            InputError, UnsupportedError: as `run`.
        """
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
