"""What stands between a layer's projection of q, k and v and its attention over pages, in one operation."""

from __future__ import annotations

import torch

from tilewise.core.dispatch import Row, named
from tilewise.core.readback import unreadable, values_checked
from tilewise.ops.qkv_prologue.problem import Call, check_eps, kind_of, make_call
from tilewise.ops.qkv_prologue.table import ROWS, choose, run
from tilewise.quant import ByChannel, Encoded
from tilewise.rotary import Rope


class QKVPrologue:
    """Normalises and rotates queries and keys of some tokens, and writes keys and values into pages of a KV cache.

    A run is the same as `tilewise.rms_norm` of q and k, `tilewise.rope` of q and `tilewise.kv_write(k, v, ...,
    rope=rope)`, but that numbers are rounded once, after the rotation. All layers of a model's step can share one
    object: what they have in common is checked once. For inference: there is no gradient.

    Args:
        slot_mapping: int32 or int64 (tokens,), contiguous: where keys and values go, as `tilewise.kv_write` takes it.
            A token with a negative slot is not written; its query is still returned.
        rope: a `tilewise.Rope` of these tokens; those that are not written need a position of the tables, too.
        eps: added to the mean of squares.
        impl: "triton", "cpu", "apart" or "reference"; None takes the first one that can run a call.

    Raises:
        InputError: eps is not a finite number, at least 0, or there is no such implementation.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (rotation); Kwon et al.,
    "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023 (pages).

    Example:
        >>> from tilewise.ops.qkv_prologue import QKVPrologue
        >>> rope = tw.Rope(*tw.rope_tables(16, 100), positions=torch.arange(3))
        >>> prologue = QKVPrologue(torch.tensor([32, 33, 34]), rope=rope)
        >>> k_pages, v_pages = torch.zeros(2, 8, 16, 2, 16)  # 8 pages of 16 tokens
        >>> prologue.run(torch.randn(3, 4 + 2 + 2, 16), k_pages, v_pages).shape
        torch.Size([3, 4, 16])
    """

    def __init__(self, slot_mapping: torch.Tensor, *, rope: Rope, eps: float = 1e-6, impl: str | None = None) -> None:
        check_eps(eps)
        if impl is not None:
            named(ROWS, impl)
        self._slots, self._rope, self._eps, self._impl = slot_mapping, rope, float(eps), impl
        self._row: Row[Call] = ROWS[-1]
        self._kind: object = None  # of the tensors that were checked last, for which the row was chosen
        self._index: list[torch.Tensor] = []  # values of slots and positions that were checked

    def run(
        self,
        qkv: torch.Tensor,
        k_pages: torch.Tensor | Encoded | ByChannel,
        v_pages: torch.Tensor | Encoded,
        *,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write keys and values, return queries.

        Args:
            qkv: (tokens, num_heads_q + 2 * num_heads_kv, head_dim), heads of q, then of k, then of v; float16, bfloat16
                or float32, unit stride in head_dim.
            k_pages, v_pages: (num_pages, page_size, num_heads_kv, head_dim), as `tilewise.kv_write` takes them.
            q_norm, k_norm: weights (head_dim,) of an RMS norm over each head of q and of k, the dtype of qkv or
                float32; both or none.

        Returns:
            q (tokens, num_heads_q, head_dim), dtype of qkv, unit stride in head_dim.

        Raises:
            InputError: an argument is wrong, or takes a gradient where gradients are recorded.
            UnsupportedError: `impl` cannot run this call.
        """
        parts = (qkv, k_pages, v_pages, q_norm, k_norm)
        kind = kind_of(parts)
        if kind is not None and kind == self._kind and self._values_are_known():
            call = Call.of(parts, self._slots, self._rope, self._eps)
            return run(self._row, call)
        call = make_call(parts, self._slots, self._rope, self._eps)
        self._row = choose(call, self._impl)
        self._kind, self._index = kind, [x.clone() for x in self._read()]
        return run(self._row, call)

    def _read(self) -> tuple[torch.Tensor, ...]:
        """Tensors whose values are checked, where they can be read now."""
        index = (self._slots, self._rope.positions)
        return () if not values_checked(self._slots.device) or any(map(unreadable, index)) else index

    def _values_are_known(self) -> bool:
        read = self._read()
        if not read:
            return True
        return bool(self._index) and all(torch.equal(x, y) for x, y in zip(read, self._index, strict=True))


def qkv_prologue(
    qkv: torch.Tensor,
    k_pages: torch.Tensor | Encoded | ByChannel,
    v_pages: torch.Tensor | Encoded,
    slot_mapping: torch.Tensor,
    *,
    rope: Rope,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    impl: str | None = None,
) -> torch.Tensor:
    """`QKVPrologue(slot_mapping, rope=rope, eps=eps, impl=impl).run(qkv, k_pages, v_pages, ...)`, for one layer."""
    prologue = QKVPrologue(slot_mapping, rope=rope, eps=eps, impl=impl)
    return prologue.run(qkv, k_pages, v_pages, q_norm=q_norm, k_norm=k_norm)
