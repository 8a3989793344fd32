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
    """Write new keys and values into pages, in place: token t goes to slot `slot_mapping[t]`, which is offset slot %
    page_size of page slot // page_size.

    The pages are those that `tilewise.attention` reads with `layout=tilewise.Paged(...)` (Kwon et al., "Efficient
    Memory Management for Large Language Model Serving with PagedAttention").

    Args:
        k: (tokens, num_heads_kv, head_dim), unit stride in head_dim, any others: a slice of a joint projection will do.
        v: (tokens, num_heads_kv, head_dim_v), likewise.
        k_pages: (num_pages, page_size, num_heads_kv, head_dim), unit stride in head_dim, any others.
        v_pages: (num_pages, page_size, num_heads_kv, head_dim_v), likewise. All four have one dtype, float16, bfloat16
            or float32, and lie on one device. Or both pages are `tilewise.quant.Encoded` of one kind: each token's head
            is then encoded on the way, as `tilewise.quant.encode` does it. Beside such values, keys may be a
            `tilewise.quant.ByChannel`, open in the dtype of k: a key whose page is open goes there; any other page is
            encoded, as `encode_by_channel` does it, by the token that takes its last slot, with the tokens before it in
            the slots before and, for slots that these do not reach, the keys that `place` says it had when it was open.
            Pages are encoded first, so a row of theirs may be another page's already.
        slot_mapping: int32 or int64 (tokens,), contiguous, on that device; a token whose slot is negative is skipped.
            No slot may come twice: which token would stay is undefined.
        rope: a `tilewise.Rope` by which keys are rotated on the way, before they are rounded or encoded; positions of
            tokens that are skipped may be anything. Queries are rotated by whoever attends.
        impl: "triton", "cpu" or "reference"; None picks the first that can.

    Slots (that they exist, and come once) and positions (that the tables have them) are checked on a CPU, and on a GPU
    with TILEWISE_DEBUG=1, since reading them there would wait for it. There is no gradient.

    Raises:
        InputError: an argument is wrong, or one takes a gradient while gradients are enabled.
        UnsupportedError: `impl` cannot run this call.
    """
    call = write_call(k, v, k_pages, v_pages, slot_mapping, rope)
    row = choose(call, impl)
    compiled_write(row, call) if recorded((*call.changed, call.k, call.v, call.slots)) else run(row, call)


def copy_pages(
    k_pages: torch.Tensor | Encoded, v_pages: torch.Tensor | Encoded, pairs: torch.Tensor, *, impl: str | None = None
) -> None:
    """Copy whole pages onto others, in place: what a sequence needs before it writes a page that it shares.

    Args:
        k_pages: (num_pages, page_size, num_heads_kv, head_dim), as `kv_write` takes them; of encoded ones codes and
            scales are copied, in two launches.
        v_pages: (num_pages, page_size, num_heads_kv, head_dim_v).
        pairs: int32 or int64 (n, 2), contiguous, on the device of the pages: each a page and the page that becomes its
            copy; a pair with a negative page is skipped. No page may be written twice, or be read and written: the
            order of the pairs is undefined.
        impl: as `kv_write` has it.

    Pairs are checked where `kv_write` checks slots. Raises InputError and UnsupportedError as `kv_write` does.
    """
    for call in copy_calls(k_pages, v_pages, pairs):
        row = choose(call, impl)
        compiled_copy(row, call) if recorded((*call.changed, call.pairs)) else run(row, call)
