"""FlashInfer's wrapper over packed keys."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch

from tilewise.adapters.flashinfer.plan import (
    Planned,
    any_batch,
    custom_mask_of,
    heads_of,
    indptr_of,
    refuse,
    same_dtype,
    tail_of,
    variant_of,
)
from tilewise.adapters.flashinfer.wrapper import PLAN_REFUSED, PLAN_STEERING, Wrapper
from tilewise.core.errors import UnsupportedError
from tilewise.core.flags import check_flags
from tilewise.layouts import Packed


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """FlashInfer's wrapper for packed queries and packed keys.

    Args:
        float_workspace_buffer: any tensor on the device of the plans; one byte is enough.
        kv_layout: "NHD".
        use_cuda_graph: if True, every plan is written into the buffers below, for graphs that read them.
        qo_indptr_buf, kv_indptr_buf: int32 (batch + 1,); needed only with `use_cuda_graph`.
        custom_mask_buf, mask_indptr_buf, jit_args, jit_kwargs: must be None.
        backend: accepted, and not used.

    Raises:
        InputError: an argument is wrong, or `use_cuda_graph` without buffers.
        UnsupportedError: kv_layout="HND", or an argument that must be None.

    Example:
        >>> import tilewise.adapters.flashinfer as flashinfer
        >>> prefill = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1))
        >>> ends = torch.tensor([0, 30, 100])
        >>> prefill.plan(ends, ends, 4, 2, 16, causal=True, q_data_type=torch.float32)
        >>> out = prefill.run(q[0], k[0], v[0])
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        refuse("a custom mask lies in one plan", custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf)
        if kv_layout == "HND":
            hint = "packed keys are (tokens, heads, dim); x.transpose(0, 1) is a view"
            raise UnsupportedError("kv_layout", got="'HND'", expected="'NHD'", hint=hint)
        buffers = (qo_indptr_buf, kv_indptr_buf)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, jit_args or jit_kwargs)

    def _layout(self, values: Any, seqlens: torch.Tensor | None) -> Packed:
        return Packed(*values)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """As the paged prefill wrapper's `plan`, where request r has the keys kv_indptr[r] to kv_indptr[r + 1] - 1.

        Args:
            qo_indptr, kv_indptr: int32 or int64 (batch + 1,), cumulative numbers of queries and of keys.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, custom_mask, packed_custom_mask, causal,
                pos_encoding_mode, use_fp16_qk_reduction, window_left, logits_soft_cap, sm_scale, rope_scale,
                rope_theta, q_data_type, kv_data_type, o_data_type: as there.
            options: as there; on a GPU fixed_split_size and disable_split_kv raise UnsupportedError.

        Raises:
            InputError, UnsupportedError: as there.
        """
        check_flags(use_fp16_qk_reduction=use_fp16_qk_reduction)
        tail_of("plan", options, steering=PLAN_STEERING, refused=PLAN_REFUSED)
        head_dim_vo = head_dim_vo or head_dim_qk
        heads_of(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        starts = indptr_of("qo_indptr", qo_indptr, self.device)
        ends = indptr_of("kv_indptr", kv_indptr, self.device, starts.shape[0] - 1)
        queries, keys = (x[1:] - x[:-1] for x in (starts, ends))
        on_host = qo_indptr.device.type == kv_indptr.device.type == "cpu"
        known = (qo_indptr.diff(), kv_indptr.diff()) if on_host else None
        self._no_graph(pos_encoding_mode, custom_mask, packed_custom_mask)
        variant = variant_of(
            head_dim_qk,
            num_qo_heads,
            self.device,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            queries=queries,
            keys=keys,
            custom=custom_mask_of(custom_mask, packed_custom_mask, (queries, keys), self.device, known),
        )
        dtype = same_dtype(q_data_type, kv_data_type, o_data_type)
        self._check_fit((starts, ends))
        alone = any_batch(options, False, self.device)
        sizes = (num_kv_heads, head_dim_qk, head_dim_vo)
        planned = Planned(Packed(starts, ends), variant, *sizes, dtype, batch_invariant=alone)
        self._commit(planned, (starts, ends))

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        """Attention of the planned batch.

        Args:
            q: (queries, num_qo_heads, head_dim_qk).
            k, v: (keys, num_kv_heads, head_dim_qk) and (keys, num_kv_heads, head_dim_vo).
            args: must be empty; they belong to `jit_args`.
            q_scale, k_scale, v_scale: numbers; the first two multiply the scores, the last the output.
            o_scale: must be None.
            out, lse: tensors that take the results.
            return_lse: return (out, lse).
            options: enable_pdl, without effect; others raise an error.

        Returns:
            out (queries, num_qo_heads, head_dim_vo), with `return_lse` also lse (queries, num_qo_heads), base 2.

        Raises:
            InputError: run before plan, or a tensor is not as planned.
            UnsupportedError: an argument that tilewise does not support.
        """
        given = dict(
            options, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, o_scale=o_scale, out=out, lse=lse,
            return_lse=return_lse,
        )  # fmt: skip
        return self._run((q, k, v), args, given)

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """`run` with options of its own: as in FlashInfer they replace those of the plan, also by their defaults.

        Args:
            q, k, v, return_lse: as in `run`.
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
        return self._run((q, k, v), (), {"return_lse": return_lse}, variant)

    forward_return_lse = partialmethod(forward, return_lse=True)
