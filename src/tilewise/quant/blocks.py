"""Queries, keys and values of attention as codes, in blocks: what `tilewise.quantize_qkv` gives and kernels multiply.

A sequence's queries come in blocks of 64, its keys and values in blocks of 128, the last one cut. Packed sequences have
slots for blocks, one after another: sequence b's begin at slot cu_seqlens[b] // rows + b, which is room enough
whatever the lengths, and slots that no block needs hold zeros.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.readback import host_values
from tilewise.layouts import Dense, Packed
from tilewise.quant.rotation import matrix
from tilewise.quant.schemes import KEYS, QUERIES, SAMPLE, SAMPLED_FROM, SAMPLED_OF, WARP, Scheme

# where keys of 16 stand in a row of codes of values: four of a thread's weights are then four bytes of an operand
KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


@dataclass(frozen=True, eq=False)
class Quantized:
    """Quantized q, k and v, and what makes them numbers again: what `tilewise.quantize_qkv` returns.

    With q^ and k^ codes times scales, the score of query i and key j, before softmax's scale, is

        q^[i] k^[j] + q_mean[block of i] k_exact[j] + q_bias[i]

    and with v^ and weights p, o = sum_j p[j] v^[j] + v_mean for a row that sees a key. Terms that are None are absent.
    Shapes are those of the dense layout, contiguous; "blocks" are those of a sequence, of 64 queries or 128 keys.
    Packed, (batch, seqlen, ...) is (total, ...), and (batch, heads, blocks, ...) is (heads, slots, ...).

    Attributes:
        scheme: a `Sage` or `FP8`.
        layout: a `Dense` or `Packed`.
        q: (batch, seqlen_q, num_heads_q, head_dim), int8 (also of int4) or float8_e4m3fn.
        k: (batch, seqlen_k, num_heads_kv, head_dim), likewise.
        v: with pv="fp8" float8_e4m3fn (batch, num_heads_kv, head_dim_v, 128 * blocks), keys along the last dimension in
            `KEY_ORDER` inside each 16, zeros after the last; else (batch, seqlen_k, num_heads_kv, head_dim_v) numbers.
        q_scale: float32 (batch, num_heads_q, blocks, groups), where `row_groups` says which group a row is in; 0 for a
            group of zeros, NaN for one that held NaN or an infinity. "head" is one group with the same scale in all
            blocks of a sequence.
        k_scale: likewise (batch, num_heads_kv, blocks, groups).
        v_scale: float32 (batch, num_heads_kv, head_dim_v) for "channel" and "head", (batch, num_heads_kv, blocks, 1)
            for "block", None where v is not quantized.
        q_mean: (batch, num_heads_q, blocks, head_dim) of the dtype of q as given, where queries are centred.
        k_mean: float32 (batch, num_heads_kv, head_dim), where keys are centred, the mean of `keys_of_mean`; packed
            likewise, by sequence.
        v_mean: float32 (batch, num_heads_kv, head_dim_v), where values are; packed likewise.
        q_bias: float32 (batch, num_heads_q, seqlen_q), packed (num_heads_q, total_q), where keys are centred: the
            product of a query, centred if queries are, with k_mean.
        k_exact: the keys as given, where queries are centred.
        q_sums, k_sums: with `sums=True`, sums of each block's rows as given, and of the same rows scaled to length 1,
            float32 (batch, heads, blocks, head_dim).
        turned: whether queries or keys were rotated by their positions.

    Example:
        >>> codes = tw.quantize_qkv(q, k, v, scheme=tw.Sage2())
        >>> codes.q.dtype, codes.v.dtype
        (torch.int8, torch.float8_e4m3fn)
    """

    scheme: Scheme
    layout: Dense | Packed
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor | None
    q_mean: torch.Tensor | None
    k_mean: torch.Tensor | None
    v_mean: torch.Tensor | None
    q_bias: torch.Tensor | None
    k_exact: torch.Tensor | None
    q_sums: tuple[torch.Tensor, torch.Tensor] | None = None
    k_sums: tuple[torch.Tensor, torch.Tensor] | None = None
    turned: bool = False

    @property
    def tensors(self) -> dict[str, Any]:
        """Those that are there, and those that must be, by name."""
        own = {name: getattr(self, name) for name in ("q", "k", "v", "q_scale", "k_scale")}
        for name, x in vars(self).items():
            if isinstance(x, tuple):
                own |= {f"{name}[{n}]": part for n, part in enumerate(x)}
            elif x is not None and name not in ("scheme", "layout", "turned"):
                own[name] = x
        if isinstance(self.layout, Packed):
            own |= {"layout cu_seqlens_q": self.layout.cu_seqlens_q, "layout cu_seqlens_k": self.layout.keys}
        return own

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, means and biases."""
        own = {name: x for name, x in vars(self).items() if isinstance(x, torch.Tensor) and name != "k_exact"}
        return sum(x.nbytes for x in own.values())

    def numbers(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q, k, v) whose exact attention, with the scale of the original head_dim, is attention over the codes.

        q and k have more columns, for what centring took out; v has its mean.

        Args:
            dtype: float64 is exact, float32 is the arithmetic of kernels.

        Returns:
            (q, k, v), (batch, seqlen, heads, columns), packed (total, heads, columns).
        """
        q, k = (self.rows(side, dtype) for side in ("q", "k"))
        if self.q_mean is not None:
            assert self.k_exact is not None
            q = torch.cat([q, self.of_blocks(self.q_mean[..., None, :], "q", dtype)], -1)
            k = torch.cat([k, self.k_exact.to(dtype)], -1)
        if self.q_bias is not None:
            q = torch.cat([q, self.q_bias.to(dtype).transpose(-1, -2).unsqueeze(-1)], -1)
            k = torch.cat([k, k.new_ones(*k.shape[:-1], 1)], -1)
        v = self.values(dtype)
        return q, k, v if self.v_mean is None else v + self.of_sequences(self.v_mean, "k", dtype)

    def whole(self, dtype: torch.dtype, centred_keys: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q, k, v) of the given shapes, dequantized, rotated back, and with the means that centring took out.

        Their attention equals that of the codes, except for the rounding errors of products of codes and means.

        Args:
            dtype: of the results, which are computed in float32.
            centred_keys: if True, keys are left without their mean.

        Returns:
            (q, k, v).
        """
        q, k = (self._rotated_back(self.rows(side, torch.float32)) for side in ("q", "k"))
        if self.q_mean is not None:
            q = q + self.of_blocks(self.q_mean[..., None, :], "q", torch.float32)
        if self.k_mean is not None and not centred_keys:
            k = k + self.of_sequences(self.k_mean, "k", torch.float32)
        v = self.values(torch.float32)
        v = v if self.v_mean is None else v + self.of_sequences(self.v_mean, "k", torch.float32)
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def rows(self, side: str, dtype: torch.dtype) -> torch.Tensor:
        """Queries ("q") or keys ("k"), codes times scales: centred and rotated as they were."""
        codes, scale = (self.q, self.q_scale) if side == "q" else (self.k, self.k_scale)
        shared = self.scheme.q_scale if side == "q" else self.scheme.k_scale
        return codes.to(dtype) * self.of_blocks(scale[..., row_groups(side, shared)].unsqueeze(-1), side, dtype)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Values, codes times scales, centred as they were."""
        v = self.v.to(dtype)
        if self.v_scale is None:
            return v
        there = [KEY_ORDER.index(n) for n in range(16)]
        blocks = v.shape[-1] // KEYS
        v = v.view(*v.shape[:-1], blocks, KEYS // 16, 16)[..., there].flatten(-2)  # (..., dim, blocks, keys)
        v = self.of_blocks(v.movedim(-3, -1), "k", dtype).contiguous()
        if self.scheme.v_scale == "block":
            return v * self.of_blocks(self.v_scale[..., None, :], "k", dtype)
        return v * self.of_sequences(self.v_scale, "k", dtype)

    def of_sequences(self, x: torch.Tensor, side: str, dtype: torch.dtype) -> torch.Tensor:
        """What a sequence's rows share, (batch, heads, columns), by query or by key."""
        if isinstance(self.layout, Dense):
            return x.to(dtype)[:, None]
        return x.to(dtype)[self._places(side)[0]]

    def _rotated_back(self, x: torch.Tensor) -> torch.Tensor:
        return x @ matrix(x.shape[-1], 0, x.device).T if self.scheme.rotate == "hadamard" else x

    def of_blocks(self, x: torch.Tensor, side: str, dtype: torch.dtype) -> torch.Tensor:
        """(batch, seqlen, heads, columns) of (batch, heads, blocks, rows or 1, columns), or packed."""
        x = x.to(dtype).expand(*x.shape[:-2], rows_of_block(side), -1)
        if isinstance(self.layout, Dense):
            return x.flatten(2, 3)[:, :, : (self.q if side == "q" else self.k).shape[1]].transpose(1, 2)
        _, slot, place = self._places(side)
        return x[:, slot, place].transpose(0, 1)

    def _places(self, side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each of packed rows its sequence, its block's slot, and its place there."""
        assert isinstance(self.layout, Packed)
        starts = (self.layout.cu_seqlens_q if side == "q" else self.layout.keys).long()
        step = rows_of_block(side)
        row = torch.arange((self.q if side == "q" else self.k).shape[0], device=starts.device)
        b = torch.searchsorted(starts[1:], row, right=True).clamp(max=len(starts) - 2)  # rows behind the last, any
        row = row - starts[b]
        return b, starts[b] // step + b + row // step, row % step


def rows_of_block(side: str) -> int:
    """Queries or keys of a block."""
    return QUERIES if side == "q" else KEYS


def keys_of_mean(k: torch.Tensor) -> torch.Tensor:
    """Of a sequence's keys (seqlen, ...) those whose mean is taken off all of them: any number may be, since it moves
    all scores of a query alike. Of many keys they are 64 of each 512, at an offset that takes turns, so that no pattern
    of the sequence goes along with it; the first keys, which often are far from the others, are not among them.
    """
    length = k.shape[0]
    if length < SAMPLED_FROM:
        return k
    start = torch.arange(0, length, SAMPLED_OF, device=k.device)
    first = start + (5 * (start // SAMPLED_OF) + 3) % (SAMPLED_OF // SAMPLE) * SAMPLE
    rows = (first[:, None] + torch.arange(SAMPLE, device=k.device)).flatten()
    return k[rows[rows < length]]


def row_groups(side: str, shared: str) -> list[int]:
    """For each row of a block of queries ("q") or keys ("k") which of the block's scales it has."""
    rows = range(rows_of_block(side))
    if shared == "token":
        return list(rows)
    if shared == "thread":
        return [r // WARP * 8 + r % 8 for r in rows] if side == "q" else [r % 8 // 2 for r in rows]
    return [r // WARP if shared == "warp" else 0 for r in rows]


def num_slots(rows: int, step: int, sequences: int | None) -> int:
    """Blocks of `step` rows that a sequence has, or slots of packed `sequences` of so many rows in all."""
    return -(-rows // step) if sequences is None else rows // step + sequences


_SHARED = ("token", "thread", "warp", "block", "head")
_GROUPS = {(side, shared): 1 + row_groups(side, shared)[-1] for side in ("q", "k") for shared in _SHARED}


def groups_of_block(side: str, shared: str) -> int:
    """How many scales a block of queries ("q") or keys ("k") has."""
    return _GROUPS[side, shared]


def sequences(cu_seqlens: torch.Tensor, side: str) -> list[tuple[int, slice, slice]]:
    """Of packed queries ("q") or keys ("k") each sequence, its rows and its slots; reads the lengths on the host."""
    cu = host_values(cu_seqlens)
    assert cu is not None
    step = rows_of_block(side)
    found = []
    for b, (first, end) in enumerate(itertools.pairwise(cu)):
        slot = first // step + b
        found.append((b, slice(first, end), slice(slot, slot - (first - end) // step)))
    return found
