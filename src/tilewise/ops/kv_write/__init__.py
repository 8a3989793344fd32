"""Writing into pages of a KV cache: new keys and values into their slots, and whole pages onto others.

A call is checked and collected (`problem`), matched to an implementation (`table`), and run as it is or as a custom
operator that torch.compile knows to change its pages (`torch_op`).
"""

from __future__ import annotations

import torch

from tilewise.core.tensors import recorded
from tilewise.ops.kv_write.problem import copy_calls, write_call
from tilewise.ops.kv_write.table import choose
from tilewise.ops.kv_write.torch_op import compiled_copy, compiled_write, run
from tilewise.quant import ByChannel, Encoded
from tilewise.rotary import Rope


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor | Encoded | ByChannel,
    v_pages: torch.Tensor | Encoded,
    slot_mapping: torch.Tensor,
    *,
    rope: Rope | None = None,
    impl: str | None = None,
) -> None:
    """Write new keys and values into pages, in place: token t goes to slot slot_mapping[t].

    A slot is offset slot % page_size of page slot // page_size, as `tilewise.attention` reads pages with
    `layout=tilewise.Paged(...)`. Slots and positions are checked on a CPU, and on a GPU only with TILEWISE_DEBUG=1,
    since reading them waits for the GPU. There is no gradient.

    Args:
        k: (tokens, num_heads_kv, head_dim), unit stride in head_dim, any others: a slice of a joint projection will do.
        v: (tokens, num_heads_kv, head_dim_v), likewise.
        k_pages: (num_pages, page_size, num_heads_kv, head_dim), unit stride in head_dim, any others.
        v_pages: (num_pages, page_size, num_heads_kv, head_dim_v), likewise. All four have one dtype, float16, bfloat16
            or float32, and are on one device. Or both pages are `tilewise.quant.Encoded` of one kind: each token and
            head is then quantized, as by `tilewise.quant.encode`. With such values, keys may be a
            `tilewise.quant.ByChannel` whose `open` has the dtype of k. A key whose page is open is written there. A
            page that is not open is quantized, as by `encode_by_channel`, when this call writes its last slot: its
            keys are those of this call, and for the slots before them those of the row of `open` that `place` names.
            Pages are quantized before open ones are written, so such a row may already belong to another page.
        slot_mapping: int32 or int64 (tokens,), contiguous, on that device; a token with a negative slot is skipped. No
            slot may come twice: which token would stay is undefined.
        rope: a `tilewise.Rope` that rotates keys before they are rounded or quantized; positions of skipped tokens may
            be anything. Queries are rotated by the caller (`tilewise.rope`). None rotates nothing.
        impl: "triton", "cpu" or "reference"; None takes the first one that can run the call.

    Raises:
        InputError: an argument is wrong, or one takes a gradient while gradients are enabled.
        UnsupportedError: `impl` cannot run this call.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.

    Example:
        >>> k_pages, v_pages = torch.zeros(2, 8, 16, 2, 16)  # 8 pages of 16 tokens
        >>> tw.kv_write(k[0, :3], v[0, :3], k_pages, v_pages, torch.tensor([32, 33, 34]))
        >>> torch.equal(k_pages[2, :3], k[0, :3])
        True
    """
    call = write_call(k, v, k_pages, v_pages, slot_mapping, rope)
    row = choose(call, impl)
    compiled_write(row, call) if recorded((*call.changed, call.k, call.v, call.slots)) else run(row, call)


def copy_pages(
    k_pages: torch.Tensor | Encoded, v_pages: torch.Tensor | Encoded, pairs: torch.Tensor, *, impl: str | None = None
) -> None:
    """Copy whole pages onto others, in place: what a sequence needs before it writes a page that it shares.

    Pairs are checked where `kv_write` checks slots.

    Args:
        k_pages: (num_pages, page_size, num_heads_kv, head_dim), as in `kv_write`; of an `Encoded`, codes and scales are
            copied, in two launches.
        v_pages: (num_pages, page_size, num_heads_kv, head_dim_v), likewise.
        pairs: int32 or int64 (n, 2), contiguous, on the device of the pages: each a page and the page that becomes its
            copy; a pair with a negative page is skipped. No page may be written twice, or be read and written: the
            order of the pairs is undefined.
        impl: as in `kv_write`.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl` cannot run this call.

    Example:
        >>> k_pages, v_pages = torch.randn(2, 8, 16, 2, 16)
        >>> tw.copy_pages(k_pages, v_pages, torch.tensor([[0, 5]]))
        >>> torch.equal(k_pages[5], k_pages[0])
        True
    """
    for call in copy_calls(k_pages, v_pages, pairs):
        row = choose(call, impl)
        compiled_copy(row, call) if recorded((*call.changed, call.pairs)) else run(row, call)
