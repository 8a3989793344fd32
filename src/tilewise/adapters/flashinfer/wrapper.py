"""What FlashInfer's wrappers share: a plan, buffers for CUDA graphs, and the run over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partialmethod
from typing import Any

import torch

from tilewise.adapters.flashinfer.plan import (
    Cache,
    Planned,
    Variant,
    attend,
    finish,
    indices_of,
    indptr_of,
    integer,
    layout_name,
    page_lengths,
    pool_of,
    refuse,
    tail_of,
    variant_of,
)
from tilewise.core.errors import InputError
from tilewise.core.flags import check_flags
from tilewise.layouts import Packed, Paged

PLAN_STEERING = (
    "rope_scale", "rope_theta", "non_blocking", "block_tables", "seq_lens", "seq_lens_q", "fixed_split_size",
    "disable_split_kv", "max_token_per_sequence", "max_sequence_kv",
)  # fmt: skip
PLAN_REFUSED = ("prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr")
RUN_REFUSED = ("skip_softmax_threshold_scale_factor", "kv_cache_sf", "o_scale")


class Wrapper:
    """What the wrappers share: a plan, and the tensors of a CUDA graph into which a new plan is written."""

    def __init__(
        self, float_workspace_buffer: Any, kv_layout: Any, use_cuda_graph: bool, buffers: Sequence[Any], jit_args: Any
    ) -> None:
        if not isinstance(float_workspace_buffer, torch.Tensor):
            got, hint = type(float_workspace_buffer).__name__, "its device is the plan's; one byte is enough"
            raise InputError("float_workspace_buffer", got=got, expected="a tensor", hint=hint)
        refuse("write the variant as a tilewise mask and score", jit_args=jit_args)
        check_flags(use_cuda_graph=use_cuda_graph)
        self.device = float_workspace_buffer.device
        self._kv_layout = layout_name(kv_layout)
        self._buffers: list[torch.Tensor] = []
        self._planned: Planned | None = None
        if use_cuda_graph:
            if any(not isinstance(x, torch.Tensor) for x in buffers):
                expected = f"{len(buffers)} index tensors, into which plans are written"
                raise InputError("use_cuda_graph", got="True without buffers", expected=expected, hint="or leave it")
            self._buffers = list(buffers)
            self._seqlens = torch.zeros_like(buffers[-1])

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans are written into the buffers that the constructor got."""
        return bool(self._buffers)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, *int_workspace_buffers: Any) -> None:
        """Does nothing: workspaces are not used.

        Args:
            float_workspace_buffer, int_workspace_buffers: ignored.
        """

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    def _check_fit(self, values: Sequence[torch.Tensor]) -> None:
        """Raise InputError unless the values fit the buffers: indices may be shorter, all else must be as long."""
        for buffer, value in zip(self._buffers, values, strict=False):
            indices = len(values) > 2 and value is values[-2]
            if value.shape[0] > buffer.shape[0] or (value.shape != buffer.shape and not indices):
                expected = f"{buffer.shape[0]} entries, as the buffer of the CUDA graph has"
                raise InputError("plan", got=f"{value.shape[0]} entries", expected=expected, hint="pad the batch")

    def _layout(self, values: Sequence[torch.Tensor], seqlens: torch.Tensor | None) -> Paged | Packed:
        raise NotImplementedError

    def _commit(self, planned: Planned, values: Sequence[torch.Tensor], seqlens: torch.Tensor | None = None) -> None:
        """Make this the plan; with buffers, write it into them."""
        if self._buffers:
            for buffer, value in zip(self._buffers, values, strict=True):
                buffer[: value.shape[0]].copy_(value, non_blocking=True)
            if seqlens is not None:
                self._seqlens.copy_(seqlens)
            planned = replace(planned, layout=self._layout(self._buffers, self._seqlens))
        self._planned = planned

    def _no_graph(self, pos_encoding_mode: Any, custom_mask: Any = None, packed_custom_mask: Any = None) -> None:
        """Refuse what captures tensors of one plan where a CUDA graph will replay another."""
        if self._buffers:
            alibi = pos_encoding_mode if pos_encoding_mode == "ALIBI" else None
            hint = "it captures tensors of one plan; plan without buffers for CUDA graphs"
            refuse(hint, pos_encoding_mode=alibi, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)

    def _ready(self) -> Planned:
        if self._planned is None:
            name, hint = type(self).__name__, "plan once for the batch, then run for every layer"
            raise InputError(name, got="run before plan", expected="a plan", hint=hint)
        return self._planned

    def _run(
        self,
        tensors: tuple[Any, Any, Any],
        args: tuple[Any, ...],
        given: dict[str, Any],
        variant: Variant | None = None,
    ) -> Any:
        planned = self._ready()
        q_scale, k_scale, v_scale, out, lse, left, sinks = (
            given.pop(name, None) for name in ("q_scale", "k_scale", "v_scale", "out", "lse", "window_left", "sinks")
        )
        return_lse = given.pop("return_lse", False)
        check_flags(return_lse=return_lse)
        refuse("arguments of a variant of one's own (jit_args)", args=args)
        tail_of("run", given, steering=("enable_pdl",), refused=RUN_REFUSED)
        variant = planned.variant if variant is None else variant
        if left is not None:
            variant = replace(variant, window_left=integer("window_left", left, None, "-1 is no limit"))
        state = attend(planned, variant, tensors, (q_scale, k_scale), sinks)
        return finish(state, v_scale, out, lse, return_lse)

    def _variant(self, **options: Any) -> Variant:
        """The plan's variant with the options of one call of `forward`."""
        self._no_graph(options.get("pos_encoding_mode"))
        planned = self._ready()
        known = planned.variant
        return variant_of(
            planned.head_dim, known.heads, known.device, queries=known.queries, keys=known.keys, custom=known.custom,
            **options,
        )  # fmt: skip


class PagedWrapper(Wrapper):
    """Wrappers over a paged cache; index tensors are ([qo_indptr,] indptr, indices, last_page_len)."""

    def _layout(self, values: Sequence[torch.Tensor], seqlens: torch.Tensor | None) -> Paged:
        *queries, first, pages, _ = values
        assert seqlens is not None
        return Paged((first, pages), seqlens, *queries)

    def _table(
        self, indptr: Any, indices: Any, last_page_len: Any, page_size: Any, batch: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The page table on the device, and tokens of each request."""
        first = indptr_of("paged_kv_indptr", indptr, self.device, batch)
        pages = indices_of("paged_kv_indices", indices, self.device)
        last = indices_of("paged_kv_last_page_len", last_page_len, self.device, first.shape[0] - 1)
        size = integer("page_size", page_size, 1, "tokens in a page")
        if last_page_len.device.type == "cpu" and bool(((last_page_len < 0) | (last_page_len > size)).any()):
            hint, expected = "tokens in the last page of each request", f"0 to page_size {size}"
            raise InputError("paged_kv_last_page_len", got=last_page_len.tolist(), expected=expected, hint=hint)
        if indptr.device.type == "cpu" and int(indptr[-1]) > pages.shape[0]:
            expected, hint = f"at most {pages.shape[0]}, the number of indices", "indptr[-1] pages are in use"
            raise InputError("paged_kv_indptr", got=f"last {int(indptr[-1])}", expected=expected, hint=hint)
        return first, pages, last, page_lengths(first, last, size)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Attention of the planned batch.

        Args:
            q: (tokens, num_qo_heads, head_dim), one token for each request in a decode wrapper.
            paged_kv_cache: (pages, 2, page_size, num_kv_heads, head_dim), or a tuple of k and v without the 2; in
                layout HND heads come before page_size.
            args: must be empty; they belong to `jit_args`.
            q_scale, k_scale, v_scale: numbers; the first two multiply the scores, the last the output.
            out, lse: tensors that take the results.
            return_lse: return (out, lse).
            window_left: replaces that of the plan; None keeps it.
            sinks: (num_qo_heads,), one logit per head that joins the denominator.
            options: enable_pdl, without effect; others raise an error.

        Returns:
            out (tokens, num_qo_heads, head_dim_vo), with `return_lse` also lse (tokens, num_qo_heads), base 2.

        Raises:
            InputError: run before plan, or a tensor is not as planned.
            UnsupportedError: an argument that tilewise does not support.
        """
        given = dict(
            options, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=return_lse,
            window_left=window_left, sinks=sinks,
        )  # fmt: skip
        return self._run((q, *pool_of(paged_kv_cache, self._kv_layout)), args, given)

    run_return_lse = partialmethod(run, return_lse=True)
