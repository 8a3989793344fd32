"""Deliberately broken CPU paths: each classic mistake is caught by the properties that every implementation faces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewise.ops.attention import cpu, cpu_parts, gradient
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES
from tilewise.testing.matrix import Check
from tilewise.testing.properties import Setting

CAUSAL_LONG = CASES["causal"].with_(
    name="causal_long", batch=1, seqlen_q=20, seqlen_k=1300
)  # several runs of key tiles, so that the online softmax rescales
TILED = Setting("cpu_tiled")


def _mask_off_by_one(patch: pytest.MonkeyPatch) -> None:
    symbols = cpu._Sequence._symbols
    patch.setattr(cpu._Sequence, "_symbols", lambda self, *a: {**symbols(self, *a), "j": symbols(self, *a)["j"] - 1})


def _mask_from_the_top_left(patch: pytest.MonkeyPatch) -> None:
    symbols = cpu._Sequence._symbols
    patch.setattr(cpu._Sequence, "_symbols", lambda s, *a: {**symbols(s, *a), "i": symbols(s, *a)["i"] - s.shift})


def _partial_tiles_unmasked(patch: pytest.MonkeyPatch) -> None:
    tiles = cpu._Sequence.query_tiles

    def unmasked(self: Any) -> Any:
        return (replace(tile, runs=tuple((keys, False) for keys, _ in tile.runs)) for tile in tiles(self))

    patch.setattr(cpu._Sequence, "query_tiles", unmasked)


def _a_tile_forgotten(patch: pytest.MonkeyPatch) -> None:
    tiles = cpu._Sequence.query_tiles
    patch.setattr(cpu._Sequence, "query_tiles", lambda s: (replace(t, runs=t.runs[:-1] or t.runs) for t in tiles(s)))


def _softmax_not_rescaled(patch: pytest.MonkeyPatch) -> None:
    """alpha = exp2(m_old - m_new) left at 1: every exp2 of a (batch, heads, rows) tensor in the forward pass."""
    exp2 = torch.exp2
    patch.setattr(cpu.torch, "exp2", lambda x: torch.ones_like(x) if x.ndim == 3 else exp2(x))


def _lse_without_the_maximum(patch: pytest.MonkeyPatch) -> None:
    forward = cpu._Sequence.forward_tile
    patch.setattr(cpu._Sequence, "forward_tile", lambda s, t: (forward(s, t)[0], forward(s, t)[1] - 0.01))


def _delta_without_lse_gradient(patch: pytest.MonkeyPatch) -> None:
    delta = gradient.delta_of
    patch.setattr(cpu, "delta_of", lambda o, do, dlse, packed: delta(o, do, None, packed))


def _delta_forgotten(patch: pytest.MonkeyPatch) -> None:
    delta = gradient.delta_of
    patch.setattr(cpu, "delta_of", lambda *arguments: torch.zeros_like(delta(*arguments)))


def _sink_gradient_sign(patch: pytest.MonkeyPatch) -> None:
    sink = gradient.sink_gradient
    patch.setattr(gradient, "sink_gradient", lambda *a: None if sink(*a) is None else -sink(*a))  # type: ignore[operator]


def _score_slope_forgotten(patch: pytest.MonkeyPatch) -> None:
    through = cpu._Sequence._through_score
    patch.setattr(cpu._Sequence, "_through_score", lambda s, ds, *rest: (through(s, ds.clone(), *rest), ds)[1])


def _captured_gradient_forgets_a_tile(patch: pytest.MonkeyPatch) -> None:
    add = gradient.Gradients.add_captured
    patch.setattr(
        gradient.Gradients, "add_captured", lambda self, load, value, index: add(self, load, value * 0.99, index)
    )


def _wrong_head_of_a_group(patch: pytest.MonkeyPatch) -> None:
    """Heads interleaved (h % num_heads_kv) instead of grouped (h // group)."""
    grouped = cpu._Sequence._grouped

    def interleaved(self: Any, x: torch.Tensor, rows: slice) -> torch.Tensor:
        order = torch.arange(x.shape[2]).view(self.call.group, -1).T.reshape(-1)
        return grouped(self, x[:, :, order], rows)

    patch.setattr(cpu._Sequence, "_grouped", interleaved)


def _scores_rounded(patch: pytest.MonkeyPatch) -> None:
    """Scores kept in 16 bits: the error is small, and still beyond the budget of float32."""
    scores = cpu._Sequence._scores
    patch.setattr(cpu._Sequence, "_scores", lambda s, *a: tuple(x.bfloat16().float() for x in scores(s, *a)))


def _another_dropout_mask_backward(patch: pytest.MonkeyPatch) -> None:
    backward = cpu.tiled_backward

    def reseeded(call: Any, *rest: Any) -> Any:
        return backward(replace(call, seed=call.seed + 1), *rest)

    patch.setattr(cpu, "tiled_backward", reseeded)
    cpu_row = "tilewise.core.dispatch._function"
    patch.setattr(cpu_row, lambda module, name: getattr(cpu, name))


def _packed_sequences_leak(patch: pytest.MonkeyPatch) -> None:
    """Every sequence reads its keys from one row too early."""
    parts = cpu_parts.sequences
    patch.setattr(
        cpu_parts, "sequences", lambda c: [(b, q, slice(max(k.start - 1, 0), k.stop)) for b, q, k in parts(c)]
    )


FORWARD, BACKWARD = properties.equals_reference, properties.gradients_equal_reference
TWINS: list[tuple[Callable[[pytest.MonkeyPatch], None], Check, Case]] = [
    (_mask_off_by_one, FORWARD, CASES["causal"]),
    (_mask_off_by_one, properties.hidden_keys_do_not_matter, CASES["padding"]),
    (_mask_from_the_top_left, FORWARD, CASES["causal_more_keys"]),
    (_mask_from_the_top_left, properties.last_queries_stand_at_the_last_keys, CASES["causal"]),
    (_partial_tiles_unmasked, FORWARD, CASES["window"]),
    (_partial_tiles_unmasked, properties.hidden_keys_do_not_matter, CASES["padding"]),
    (_a_tile_forgotten, FORWARD, CAUSAL_LONG),
    (_softmax_not_rescaled, FORWARD, CAUSAL_LONG),
    (_lse_without_the_maximum, FORWARD, CASES["plain"]),
    (_lse_without_the_maximum, properties.parts_merge_by_lse, CASES["plain"]),
    (_delta_without_lse_gradient, BACKWARD, CASES["lse_gradient"]),
    (_delta_forgotten, BACKWARD, CASES["causal"]),
    (_delta_forgotten, properties.keys_may_be_permuted, CASES["plain"]),
    (_sink_gradient_sign, BACKWARD, CASES["sink_causal"]),
    (_score_slope_forgotten, BACKWARD, CASES["softcap_causal"]),
    (_captured_gradient_forgets_a_tile, BACKWARD, CASES["bias"]),
    (_captured_gradient_forgets_a_tile, BACKWARD, CASES["relative_bias"]),
    (_wrong_head_of_a_group, FORWARD, CASES["gqa_2"]),
    (_wrong_head_of_a_group, BACKWARD, CASES["gqa_8"]),
    (_scores_rounded, FORWARD, CASES["plain"]),
    (_scores_rounded, BACKWARD, CASES["causal"]),
    (_another_dropout_mask_backward, BACKWARD, CASES["dropout"]),
    (_packed_sequences_leak, FORWARD, CASES["packed"]),
]


@pytest.mark.parametrize(
    ("broken", "check", "case"),
    [pytest.param(*twin, id=f"{twin[0].__name__[1:]}-{twin[1].__name__}-{twin[2]}") for twin in TWINS],
)
def test_a_broken_twin_is_caught(
    broken: Callable[[pytest.MonkeyPatch], None], check: Check, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(TILED, case)  # whole, it passes
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        check(TILED, case)
