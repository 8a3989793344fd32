"""Errors of schemes by definition, exact rows wherever they stand, and who is chosen."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tests.ops.test_attention_codes_accuracy import AT_MOST, ON_AVERAGE, WHOLE, heads
from tilewise.core.errors import InputError
from tilewise.explain.accuracy import (
    MOST_SCORES,
    PUBLISHED,
    SCHEMES,
    Accuracy,
    Trial,
    Trials,
    accuracy,
    cost,
    exact_rows,
    name_of,
    picked,
    try_schemes,
)
from tilewise.quant.schemes import Scheme
from tilewise.testing.kinds import KINDS


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_errors_by_definition() -> None:
    o, exact = random(2, 3, 2, 4), random(2, 3, 2, 4, seed=1)
    found = accuracy(o, exact)
    off = (o.double() - exact.double()).flatten()
    flat = exact.double().flatten()
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(o.double().flatten(), flat, 0)), rel=1e-12)
    assert found.relative_l1 == pytest.approx(float(off.abs().sum() / flat.abs().sum()), rel=1e-12)
    assert found.rmse == pytest.approx(float(off.pow(2).mean().sqrt()), rel=1e-12)
    assert found.largest == float(off.abs().max())
    for h in range(2):
        one = accuracy(o[:, :, h : h + 1], exact[:, :, h : h + 1]).relative_l1
        assert found.heads[h] == pytest.approx(one, rel=1e-12)
    assert found.worst_head == int(found.heads[1] > found.heads[0])


def test_zeros_and_what_is_no_number() -> None:
    zeros = torch.zeros(1, 2, 2, 3)
    assert accuracy(zeros, zeros) == Accuracy(1.0, 0.0, 0.0, 0.0, (0.0, 0.0))
    assert accuracy(zeros + 1, zeros).relative_l1 == math.inf
    lost = zeros + 1
    lost[0, 0, 1, 0] = torch.nan
    found = accuracy(lost, zeros + 1)
    assert math.isnan(found.relative_l1)
    assert found.worst_head == 1
    assert not Trial(tw.Sage2(), found, 1, None).error() <= 1e9


@pytest.mark.parametrize("sizes", [(70, 70), (33, 70), (70, 33)], ids=str)
@pytest.mark.parametrize("mask", [None, tw.causal, tw.window(5) | tw.prefix(torch.tensor([3, 9]))], ids=str)
def test_exact_rows_stand_where_they_stood(mask: tw.Mask | None, sizes: tuple[int, int]) -> None:
    q, k, v = random(2, sizes[0], 4, 8), random(2, sizes[1], 2, 8, seed=1), random(2, sizes[1], 2, 5, seed=2)
    rows = picked(sizes[0], 7)
    assert rows[0] == 0
    assert rows[-1] == sizes[0] - 1
    want = tw.attention(q.double(), k.double(), v.double(), mask=mask, impl="reference", scale=0.4)
    torch.testing.assert_close(exact_rows(q, k, v, mask=mask, rows=rows, scale=0.4), want[:, rows], rtol=1e-12, atol=0)


def test_exact_rows_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random(1, 20, 2, 8), random(1, 20, 2, 8, seed=1), random(1, 20, 2, 8, seed=2)
    whole = exact_rows(q, k, v, mask=tw.causal, rows=torch.arange(20))
    monkeypatch.setitem(MOST_SCORES, "cpu", 3 * 2 * 20)
    torch.testing.assert_close(exact_rows(q, k, v, mask=tw.causal, rows=torch.arange(20)), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_is_within_twice_its_table(kind: str) -> None:
    q, k, v, _ = heads(kind, False)
    tried = try_schemes(q, k, v, WHOLE, rows=128)
    assert tried.left_out == ()
    for trial in tried.ran[1:]:
        assert trial.scheme is not None
        table = WHOLE[trial.scheme][KINDS.index(kind)]
        # how far biased channels lie from 0 differs between draws by more than twice, and only Sage centres them
        own = trial.accuracy.heads if trial.scheme.smooth or kind != "biased" else trial.accuracy.heads[:1]
        assert max(own) <= AT_MOST * table
        assert trial.accuracy.heads[0] <= ON_AVERAGE * table


def test_what_cannot_run_is_left_out_and_wrong_tensors_are_errors() -> None:
    q, k, v = random(1, 9, 2, 12), random(1, 9, 2, 12, seed=1), random(1, 9, 2, 12, seed=2)
    tried = try_schemes(q, k, v, (tw.Sage2(), tw.Sage(rotate="hadamard")))
    assert [trial.scheme for trial in tried.ran] == [None, tw.Sage2()]
    ((scheme, reason),) = tried.left_out
    assert scheme == tw.Sage(rotate="hadamard")
    assert "power of 2" in reason
    with pytest.raises(InputError, match="k"):
        try_schemes(q, k[..., :3], v)
    for empty in ((q[:, :0], k, v), (q, k[:, :0], v[:, :0])):
        with pytest.raises(InputError, match="expected some numbers"):
            try_schemes(*empty)


def test_times_and_bytes() -> None:
    q, k, v = random(1, 9, 2, 16), random(1, 9, 2, 16, seed=1), random(1, 9, 2, 16, seed=2)
    times = iter((3.0, 2.0))
    tried = try_schemes(q, k, v, (tw.Sage2(),), clock=lambda call: (call(), next(times))[1])
    assert [trial.ms for trial in tried.ran] == [3.0, 2.0]
    assert tried.ran[0].nbytes == 3 * q.nbytes
    assert tried.ran[1].nbytes == tw.quantize_qkv(q, k, v, scheme=tw.Sage2()).nbytes


def trial(scheme: Scheme | None, errors: tuple[float, ...], ms: float | None = None) -> Trial:
    return Trial(scheme, Accuracy(1.0, sum(errors) / len(errors), 0.0, 0.0, errors), 0, ms)


def test_the_fastest_that_fits_is_chosen() -> None:
    tried = Trials(
        (
            trial(None, (0.0, 0.0), 3.0),
            trial(tw.Sage1(), (0.1, 0.1), 2.0),
            trial(tw.Sage2(), (0.3, 0.1), 1.0),
            trial(tw.Sage(smooth=("q", "k")), (0.2, 0.2), 0.5),
        ),
        (),
    )

    def chosen(max_error: float, head: int | None = None, *, by_time: bool) -> Scheme | str | None:
        found = tried.choose(max_error, head, by_time=by_time)
        return "nothing" if found is None else found.scheme

    assert chosen(0.25, by_time=True) == tw.Sage(smooth=("q", "k"))
    assert chosen(0.25, by_time=False) == tw.Sage2()
    assert chosen(0.15, by_time=False) == tw.Sage1()
    assert chosen(0.15, 1, by_time=False) == tw.Sage2()
    assert chosen(0.15, 0, by_time=True) == tw.Sage1()
    assert chosen(0.05, by_time=False) is None
    assert Trials(tried.ran[1:], ()).choose(0.05, by_time=False) is None
    with pytest.raises(InputError, match="by_time"):
        Trials((trial(tw.Sage2(), (0.0,)),), ()).choose(1.0, by_time=True)


def test_the_order_of_bits() -> None:
    """Fewer bits, then less to do before, then fewer scales; int4 is kept as int8."""
    order = [tw.FP8(), tw.FP8(q_scale="token"), tw.Sage2(), tw.Sage(smooth=("q", "k")), tw.Sage1(), None]
    assert sorted(order, key=cost) == order
    assert cost(tw.Sage(qk="int4")) == cost(tw.Sage(qk="int8"))
    assert len(set(SCHEMES)) == len(SCHEMES)


def test_names() -> None:
    assert {name_of(scheme): scheme for scheme in PUBLISHED.values()} == PUBLISHED
    assert name_of(replace(tw.Sage2(), rotate="hadamard", smooth=("v",))) == "Sage(smooth=(v,),rotate=hadamard)"
