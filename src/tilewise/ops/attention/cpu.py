"""Attention on the CPU: a formula that only adds to scores by PyTorch's fused kernel, any other by tiles.

The tiled form visits only tiles that the TileMap calls visible, applies the mask only where it must, and keeps
O(seqlen) memory: one tile of scores at a time. Its backward recomputes scores from lse (Dao et al., "FlashAttention").
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tilewise.core.philox import keep_mask
from tilewise.formula.evaluate import evaluate
from tilewise.formula.expr import Expr
from tilewise.formula.grad import gradients
from tilewise.formula.limits import MOST
from tilewise.formula.optimize import written_once
from tilewise.formula.structure import Bound
from tilewise.formula.walk import postorder
from tilewise.ops.attention import cpu_decode, cpu_fused
from tilewise.ops.attention.cpu_parts import MAX_RUN, fill, parts_of, runs_of
from tilewise.ops.attention.gradient import Gradients, delta_of
from tilewise.ops.attention.problem import Call
from tilewise.schedule.tilemap import EMPTY, FULL, classify

BLOCK_M, BLOCK_N = 256, 128
IN_CACHE = 2**19  # scores of a tile at a time: 2 MiB, which every step goes over once more
Weights = Callable[[torch.Tensor], torch.Tensor]
# of a log-sum: beyond, its rounding shows in weights that are counted from it
_FAR = {torch.float32: 2.0**10, torch.float64: 2.0**39}
LOG2E = math.log2(math.e)  # scores are taken in base 2: exp2 is one pass, exp slow where it underflows


def tiled_forward(call: Call, of_weights: Weights | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiled online softmax for any formula, head dimension and layout; `of_weights` makes what values are multiplied by
    of weights up to 1, the largest of a row so far, while sums have these.
    """
    decoding = cpu_decode.prepare(call) if of_weights is None and cpu_decode.serves(call) else None
    return _forward(call, decoding, of_weights)


def _forward(
    call: Call, decoding: cpu_decode.Decoding | None, of_weights: Weights | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = call.new_output(), call.new_lse()
    with _full_precision():
        # bits of other requests do not depend on those that decode
        left = None if decoding is None else cpu_decode.forward(call, decoding, o, lse)
        for part, rows, _ in parts_of(call, apart=call.batch_invariant, only=left):
            o_part, lse_part = o, lse
            if rows is not None:
                o_part, lse_part = (o[None, rows], lse[None, :, rows]) if call.packed else (o[rows], lse[rows])
            blocks = _fused_blocks(part) if of_weights is None else None
            if blocks is None:
                _forward_by_tiles(part, of_weights, o_part, lse_part)
                continue
            doubtful = cpu_fused.forward(part, blocks, o_part, lse_part)
            if bool(doubtful.any()):  # such rows alone: bits of others do not depend on them
                o_tiled, lse_tiled = torch.empty_like(o_part), torch.empty_like(lse_part)
                _forward_by_tiles(part, None, o_tiled, lse_tiled)
                o_part.copy_(torch.where(doubtful.transpose(1, 2)[..., None], o_tiled, o_part))
                lse_part.copy_(torch.where(doubtful, lse_tiled, lse_part))
    return o, lse


def planned(call: Call) -> cpu_decode.Planned | None:
    """What runs of a plan share; None for nothing."""
    return cpu_decode.Planned(call, _forward) if cpu_decode.serves(call) else None


def _fused_blocks(part: Call) -> list[cpu_fused.Block] | None:
    return cpu_fused.blocks_of(part) if cpu_fused.serves(part) else None


def _forward_by_tiles(part: Call, of_weights: Weights | None, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Write o and lse of a dense call."""
    for few in _Sequence(part, of_weights).by_heads():
        o_few, lse_few = o[:, :, few.heads], lse[:, few.heads]
        for tile in few.query_tiles():
            o_few[:, tile.rows], lse_few[:, :, tile.rows] = few.forward_tile(tile)


def tiled_backward(
    call: Call, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    """Gradients of q, k, v, sink and the score's captured tensors."""
    delta = delta_of(o, do, dlse, call.packed)
    grads = Gradients.zeros(call)
    with _full_precision():
        for part, rows, keys in parts_of(call):
            views = grads.rows(rows, keys)
            lse_p = lse if rows is None else lse[None, :, rows]
            delta_p = delta if rows is None else delta[None, :, rows]
            do_p = do if rows is None else do[None, rows]
            o_p = o if rows is None else o[None, rows]
            blocks = None if dlse is not None or any(call.grad_captured) else _fused_blocks(part)
            steady = cpu_fused.steady(o_p, lse_p) if blocks is not None else torch.zeros(1, dtype=torch.bool)
            if blocks is None or not steady.any():
                _backward_by_tiles(part, do_p, lse_p, delta_p, views)
                continue
            cpu_fused.backward(part, blocks, o_p, lse_p, do_p, views)
            if not steady.all():  # such elements alone: bits of others do not depend on them
                tiled = Gradients.zeros(part)
                _backward_by_tiles(part, do_p, lse_p, delta_p, tiled)
                for fused, other in ((views.dq, tiled.dq), (views.dk, tiled.dk), (views.dv, tiled.dv)):
                    fused[~steady] = other[~steady]
    return grads.finish(call, lse, delta)


def _backward_by_tiles(part: Call, do: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, views: Gradients) -> None:
    """Add a dense call's part to the gradients."""
    for few in _Sequence(part).by_heads():
        into = few.of_heads(views)
        for tile in few.query_tiles():
            few.backward_tile(tile, do[:, :, few.heads], lse[:, few.heads], delta[:, few.heads], into)


def _full_precision() -> torch.autocast:
    """Autocast would take products of the float32 copies in 16 bits."""
    return torch.autocast("cpu", enabled=False)


@dataclass(frozen=True)
class _Tile:
    """One tile of queries and the runs of key rows that it visits, each with those of its parts that the mask cuts."""

    rows: slice
    runs: tuple[tuple[slice, tuple[slice, ...]], ...]


class _Sequence:
    """A dense call prepared for tiles: positions, tile classes, and the score's derivative."""

    def __init__(self, call: Call, of_weights: Weights | None = None) -> None:
        self.call, self.num_heads = call, call.num_heads_q
        self.of_weights = of_weights
        self.compute = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        self.least = -torch.finfo(self.compute).max if call.score is None else -MOST * LOG2E  # what is below is hidden
        self.shift = call.rows_k - call.rows_q
        self.b = torch.arange(call.first_batch, call.first_batch + call.batch, device="cpu")[:, None, None, None]
        self.h = torch.arange(call.num_heads_q, device="cpu")[:, None, None]
        self.heads, self.heads_kv = slice(0, call.num_heads_q), slice(0, call.num_heads_kv)
        self.visible = None if call.mask is None else written_once(call.mask.structure.root)
        self.slope: Expr | None = None
        self.captured: list[tuple[Expr, Expr]] = []  # (load, its gradient)
        if call.score is not None:
            structure = call.score.structure
            symbol = _score_symbol(structure.root)
            loads = [x for x in structure.loads if x.kind == "float" and call.grad_captured[x.value]]
            made = gradients(structure.root, [*([] if symbol is None else [symbol]), *loads])
            self.slope = None if symbol is None else made[0]
            self.captured = list(zip(loads, made[len(made) - len(loads) :], strict=True))

    def by_heads(self) -> Iterator[_Sequence]:
        """The same for as many heads of keys at a time as have their scores of a tile in cache."""
        call = self.call
        of_one = call.batch * call.group * min(BLOCK_M, call.rows_q) * min(MAX_RUN * BLOCK_N, max(1, call.rows_k))
        few = max(1, IN_CACHE // of_one)
        classes = self.classes  # of all heads
        for first in range(0, call.num_heads_kv, few):
            part = copy.copy(self)
            part.classes = classes
            part.heads_kv = slice(first, min(first + few, call.num_heads_kv))
            part.heads = slice(first * call.group, part.heads_kv.stop * call.group)
            part.h = self.h[part.heads]
            part.call = replace(
                call,
                q=call.q[:, :, part.heads],
                k=call.k[:, :, part.heads_kv],
                v=call.v[:, :, part.heads_kv],
                sink=None if call.sink is None else call.sink[part.heads],
                skip=None if call.skip is None else call.skip[part.heads],
            )
            yield part

    def of_heads(self, grads: Gradients) -> Gradients:
        """Views of these heads' gradients."""
        dq, dk, dv = grads.dq[:, :, self.heads], grads.dk[:, :, self.heads_kv], grads.dv[:, :, self.heads_kv]
        return Gradients(dq, dk, dv, None, grads.captured)

    def query_tiles(self) -> Iterator[_Tile]:
        call = self.call

        def keys_of(run: range) -> slice:
            return slice(run.start * BLOCK_N, min(run.stop * BLOCK_N, call.rows_k))

        for m, row in enumerate(self.classes.tolist()):
            rows = slice(m * BLOCK_M, min((m + 1) * BLOCK_M, call.rows_q))
            visited = runs_of(n for n, kind in enumerate(row) if kind != EMPTY)
            yield _Tile(
                rows,
                tuple(
                    (keys_of(run), tuple(map(keys_of, runs_of(n for n in run if row[n] != FULL)))) for run in visited
                ),
            )

    @functools.cached_property
    def classes(self) -> torch.Tensor:
        """int8 (query tiles, key tiles): visited if any batch element or head needs it, FULL only if all have it so."""
        call = self.call
        if call.mask is None:
            tiles = (-(-call.rows_q // BLOCK_M), -(-call.rows_k // BLOCK_N))
            return torch.full(tiles, FULL, dtype=torch.int8, device="cpu")
        classes = classify(
            call.mask,
            seqlen_q=call.rows_q,
            seqlen_k=call.rows_k,
            batch=call.batch,
            heads=call.num_heads_q,
            block_m=BLOCK_M,
            block_n=BLOCK_N,
            first_batch=call.first_batch,
        )
        low, high = classes.amin((0, 1)), classes.amax((0, 1))
        return torch.where(low == high, low, torch.where(high > 0, 1, 0).to(torch.int8))

    def _symbols(self, rows: slice, *keys: slice) -> dict[str, torch.Tensor]:
        i = torch.arange(rows.start, rows.stop, device="cpu")[:, None] + self.shift
        j = torch.cat([torch.arange(run.start, run.stop, device="cpu") for run in keys])
        return {"b": self.b, "h": self.h, "i": i, "j": j}

    def _grouped(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        """(batch, rows, heads_q, dim) -> (batch, heads_kv, group * rows, dim)."""
        x = x[:, rows].to(self.compute)
        x = x.reshape(*x.shape[:2], self.call.num_heads_kv, self.call.group, x.shape[-1])
        return x.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def _keys(self, x: torch.Tensor, keys: slice) -> torch.Tensor:
        return x[:, keys].to(self.compute).transpose(1, 2)

    def _scaled(self, q: torch.Tensor) -> torch.Tensor:
        """Queries whose products with keys are scores before the formula, or of base 2 where there is none."""
        return q * (self.call.scale * LOG2E if self.call.score is None else self.call.scale)

    def _scores(
        self, scaled: torch.Tensor, keys: slice, rows: slice, cuts: tuple[slice, ...], sloped: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(raw, final) scores (batch, heads_q, rows, keys): the scaled dot product, and what the softmax sees, base 2;
        and if `sloped` the formula's derivative by s, which shares much of its arithmetic, else 1.

        The second may be overwritten, since new memory costs a CPU more than arithmetic; without a score it is the
        first.
        """
        call = self.call
        s = torch.matmul(scaled, self._keys(call.k, keys).transpose(-1, -2))
        s = raw = s.view(call.batch, call.num_heads_q, rows.stop - rows.start, -1)
        slope = raw.new_ones(())
        if call.score is not None:
            symbols = {**self._symbols(rows, keys), "s": raw, "g": slope}
            roots = [call.score.structure.root, *([self.slope] if sloped and self.slope is not None else [])]
            s, slope = (*self._evaluate(call.score, roots, symbols), slope)[:2]
            s = s.expand_as(raw).mul(LOG2E)
        if call.mask is not None and self.visible is not None and cuts:
            (seen,) = self._evaluate(call.mask, [self.visible], self._symbols(rows, *cuts))
            parts = [s[..., cut.start - keys.start : cut.stop - keys.start] for cut in cuts]
            fill(parts, seen, -torch.inf)
        return raw, s, slope

    def _evaluate(self, bound: Bound, roots: Sequence[Expr], symbols: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        tensors = [t.detach() for t in bound.tensors]
        return evaluate(roots, symbols, tensors, bound.numbers, self.compute)

    def _keep(self, rows: slice, keys: slice) -> torch.Tensor:
        symbols = self._symbols(rows, keys)
        row = self.b * self.num_heads + self.h
        assert self.call.seed is not None
        keep = keep_mask(int(self.call.seed), self.call.dropout, row, symbols["i"], symbols["j"])
        return keep.to(self.compute)

    def _begun(self, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The maxima and sums of rows (batch, heads, rows) that have seen no key yet: the sink's, if there is one."""
        m = torch.full(tuple(shape), -torch.inf, dtype=self.compute, device="cpu")
        if self.call.sink is not None:
            m = (self.call.sink.detach().to(self.compute) * LOG2E)[None, :, None].expand(m.shape)
        return m, torch.where(m == -torch.inf, 0.0, 1.0).to(self.compute)

    def _step(
        self, m: torch.Tensor, l: torch.Tensor, s: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A step of online softmax: (maxima, sums, weights, written over s, the factor of what came before)."""
        m_new = torch.maximum(m, s.amax(-1))
        m_use = m_new.clamp(min=self.least)
        p = s.sub_(m_use[..., None]).exp2_()
        alpha = torch.exp2(m - m_use)
        return m_new, l * alpha + p.sum(-1), p, alpha

    def forward_tile(self, tile: _Tile) -> tuple[torch.Tensor, torch.Tensor]:
        """(o (batch, rows, heads, dim_v), lse (batch, heads, rows)) of one tile of queries."""
        call, rows = self.call, tile.rows
        q = self._grouped(call.q, rows)
        shape = (call.batch, call.num_heads_q, rows.stop - rows.start)
        m, l = self._begun(shape)
        acc = q.new_zeros((*q.shape[:-1], call.head_dim_v))
        scaled = self._scaled(q)
        for keys, cuts in tile.runs:
            _, s, _ = self._scores(scaled, keys, rows, cuts)
            if call.skip is not None:
                low = (s.amax(-1) - m).amax(-1) < -call.skip * LOG2E  # (batch, heads)
                s = s.masked_fill(low[..., None, None], -torch.inf)
            m, l, p, alpha = self._step(m, l, s)
            if call.dropout > 0.0:
                p *= self._keep(rows, keys)
            if self.of_weights is not None:
                p = self.of_weights(p)
            acc *= alpha.view(*acc.shape[:-1], 1)
            acc += torch.matmul(p.view(*q.shape[:-1], -1), self._keys(call.v, keys))
        lse = torch.where(l == 0.0, -torch.inf, (m + torch.log2(l)) / LOG2E).where(m != torch.inf, m)
        o = acc / torch.where(l == 0.0, 1.0, l).view(*acc.shape[:-1], 1) / (1.0 - call.dropout)
        o = o.view(call.batch, call.num_heads_q, -1, call.head_dim_v).transpose(1, 2)
        return o.to(call.q.dtype), lse

    def _normalisation(
        self, tile: _Tile, scaled: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(What exponents of weights are counted from, in base 2; what the weights are divided by, None for nothing):
        the lse, or in rows of scores so large that it does not tell their sum, the largest score and the sum, anew.
        """
        lse2 = torch.where(lse == -torch.inf, 0.0, lse) * LOG2E
        lse2 = lse2.masked_fill_(lse2 == torch.inf, torch.nan)  # as the weights of such rows are
        far = lse.isfinite() & (lse.abs() > _FAR[self.compute])
        if not far.any():
            return lse2, None
        m, l = self._begun(lse.shape)
        for keys, cuts in tile.runs:
            m, l, _, _ = self._step(m, l, self._scores(scaled, keys, tile.rows, cuts)[1])
        return torch.where(far, m, lse2), torch.where(far, l, 1.0)

    def backward_tile(
        self, tile: _Tile, do: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, grads: Gradients
    ) -> None:
        """Add one tile's part to the gradients."""
        call, rows = self.call, tile.rows
        q, do_rows = self._grouped(call.q, rows), self._grouped(do, rows)
        lse_rows, delta_rows = lse[:, :, rows], delta[:, :, rows].to(self.compute)
        dq = torch.zeros_like(q)
        scaled, q = self._scaled(q), q * call.scale
        start, sums = self._normalisation(tile, scaled, lse_rows)
        for keys, cuts in tile.runs:
            raw, s, slope = self._scores(scaled, keys, rows, cuts, True)
            p = s.sub_(start[..., None]).exp2_()
            if sums is not None:
                p /= sums[..., None]
            dp = torch.matmul(do_rows, self._keys(call.v, keys).transpose(-1, -2)).view_as(p)
            dropped = p
            if call.dropout > 0.0:
                keep = self._keep(rows, keys) / (1.0 - call.dropout)
                dropped, dp = p * keep, dp * keep
            ds = dp.sub_(delta_rows[..., None]).mul_(p)
            flat = (*q.shape[:-1], keys.stop - keys.start)
            grads.dv[:, keys] += torch.matmul(dropped.reshape(flat).transpose(-1, -2), do_rows).transpose(1, 2)
            ds = self._through_score(ds, raw, slope, rows, keys, grads)
            dq += torch.matmul(ds.reshape(flat), self._keys(call.k, keys))
            grads.dk[:, keys] += torch.matmul(ds.reshape(flat).transpose(-1, -2), q).transpose(1, 2)
        dq = dq.mul_(call.scale).view(call.batch, call.num_heads_q, -1, call.head_dim).transpose(1, 2)
        grads.dq[:, rows] = dq.to(grads.dq.dtype)

    def _through_score(
        self, ds: torch.Tensor, raw: torch.Tensor, slope: torch.Tensor, rows: slice, keys: slice, grads: Gradients
    ) -> torch.Tensor:
        """Gradient before the score formula; gradients of captured tensors are added to `grads`."""
        score = self.call.score
        if score is None:
            return ds
        if self.captured:
            symbols = {**self._symbols(rows, keys), "s": raw, "g": ds}
            for load, adjoint in self.captured:
                value, *index = self._evaluate(score, [adjoint, *load.args], symbols)
                grads.add_captured(load, value.expand_as(ds), index)
        if self.slope is None:
            return torch.zeros_like(ds)
        if math.isfinite(float(slope.sum())):
            return ds.mul_(slope)
        through = ds * slope
        fill([through], ds != 0.0, 0.0)  # a hidden score may have no finite derivative
        return through


def _score_symbol(root: Expr) -> Expr | None:
    return next((node for node in postorder([root]) if node.op == "sym" and node.value == "s"), None)
