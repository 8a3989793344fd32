"""Parameters of selections found on tensors: within their bounds, by independent measures."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.explain.sparsity import (
    NO_LAM,
    Canvas,
    by_head,
    fit_sparge,
    frontier,
    seen_tiles,
    spend,
    window_costs,
    window_errors,
    window_losses,
)

BLOCK = (16, 16)


def coherent(seqlen: int = 256, heads: int = 4, seed: int = 0, batch: int = 1) -> tuple[torch.Tensor, ...]:
    """Tiles of like tokens: head 0 has sharp weights, the last ones flat."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    centres = normal(batch, seqlen // 16, 1, 32).repeat_interleave(16, 1)
    sharp = torch.linspace(2.5, 0.1, heads)[:, None]
    return tuple(0.3 * normal(batch, seqlen, heads, 32) + centres * size for size in (sharp, 1.0, 1.0))


@pytest.mark.parametrize("mask", [None, tw.causal], ids=["full", "causal"])
@pytest.mark.parametrize("far", ["drop", "summary"])
def test_heads_keep_the_bound_and_leave_tiles_out(mask: Any, far: str) -> None:
    q, k, v = coherent(batch=2)
    fit = fit_sparge(q, k, v, 0.05, mask=mask, block=BLOCK, far=far)
    select = fit.select(BLOCK, far, None)
    exact = tw.attention(q.double(), k.double(), v.double(), mask=mask, impl="reference")
    found = tw.attention(q, k, v, mask=mask, select=select)
    errors = by_head(found.double(), exact)
    assert (errors <= 0.05 * 1.001).all()
    torch.testing.assert_close(errors, torch.tensor(fit.errors), rtol=0.01, atol=1e-5)
    kept = tw.select_tiles(q, k, select, mask=mask)
    shares = (kept.kept & (kept.classes != 0)).sum((0, 2, 3)) / (kept.classes != 0).expand_as(kept.kept).sum((0, 2, 3))
    torch.testing.assert_close(shares, torch.tensor(fit.density))
    assert fit.density[0] < 0.5, "sharp weights lie in few tiles"
    if far == "summary":
        fewer = fit_sparge(q, k, v, 0.05, mask=mask, block=BLOCK).density
        assert sum(fit.density) <= sum(fewer), "what stands for the rest lets more be left out"


def test_what_nothing_serves_keeps_all_tiles() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, 2, 16) for _ in range(3))
    fit = fit_sparge(q, k, v, 1e-9, block=BLOCK)
    assert (fit.density, fit.errors, fit.tau) == ((1.0, 1.0), (0.0, 0.0), (1.0, 1.0))
    assert torch.equal(tw.attention(q, k, v, select=fit.select(BLOCK, "drop", None), impl="reference"),
                       tw.attention(q, k, v, impl="reference"))  # fmt: skip


def many_small_weights() -> tuple[torch.Tensor, ...]:
    """Head 0: tiles behind the first three have small weights, but most of them in all. Head 1: next to none."""
    q, k = (torch.zeros(1, 4096, 2, 16) for _ in range(2))
    q[..., 0], k[:, :384, :, 0] = 4.0, torch.tensor([1.0, 20.0])
    v = torch.randn(1, 4096, 2, 16, generator=torch.Generator().manual_seed(0))
    v[:, 384:] += 1.0
    return q, k, v


@pytest.mark.parametrize("max_error", [1e-6, 0.05, 0.6])
def test_lam_keeps_the_bound_or_is_off(max_error: float) -> None:
    """Small weights are left out of tiles that are taken, too: also of a head that takes them all."""
    q, k, v = many_small_weights()
    fit = fit_sparge(q, k, v, max_error, lam=0.5)
    select = fit.select((128, 128), "drop", 0.5)
    errors = by_head(tw.attention(q, k, v, select=select), tw.attention(q, k, v))
    assert (errors <= max(max_error, 2e-6)).all(), "floats alone are off by as much"
    if max_error > 1e-6:
        torch.testing.assert_close(errors, torch.tensor(fit.errors))
        assert fit.lams == (max_error == 0.6, True), "who keeps the bound with it has it"
        assert select.skip == (0.5 if all(fit.lams) else (NO_LAM, 0.5))
    assert fit.select((128, 128), "drop", None).skip is None


def test_all_tiles_and_lam_are_measured() -> None:
    """No head can leave tiles out, and one can leave out small weights."""
    q, k, v = many_small_weights()
    q, k = (x.expand(-1, -1, 3, -1).clone() for x in (q[:, :, :1], k[:, :, :1]))
    k[:, 384:, 1, 0], v = 0.999, torch.cat((v, v[:, :, :1]), 2)
    fit = fit_sparge(q, k, v, 1e-4, lam=0.5)
    assert fit.density == (1.0, 1.0, 1.0)
    assert fit.lams == (False, True, False)
    assert fit.errors[0] == fit.errors[2] == 0.0 < fit.errors[1] <= 1e-4
    assert fit_sparge(q[:, :, :1], k[:, :, :1], v[:, :, :1], 1e-4, lam=0.5).select((128, 128), "drop", 0.5).skip is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_numbers_that_are_none_are_refused(name: str, value: float) -> None:
    given = dict(zip("qkv", coherent(seqlen=32), strict=True))
    given[name][0, 3, 1, 2] = value
    with pytest.raises(InputError, match=f"^{name}: got 1 of 4096 numbers that are NaN or infinite; expected finite"):
        fit_sparge(*given.values(), 0.05, block=BLOCK)
    if name != "v":
        canvas = Canvas((4, 8), (2, 2))
        with pytest.raises(InputError, match=f"^{name}: got 1 of"):
            window_losses(given["q"], given["k"], canvas, [(1, 1)])


def test_scores_beyond_floats_are_refused() -> None:
    q, k, v = (x * 1e25 for x in coherent(seqlen=32))
    with pytest.raises(InputError, match=r"^attention: got"):
        fit_sparge(q, k, v, 0.05, block=BLOCK)


@pytest.mark.parametrize("block", [(0, 16), (16, 16, 16), (16,), 0])
def test_tiles_that_are_none_are_refused(block: Any) -> None:
    with pytest.raises(InputError, match="Select block"):
        fit_sparge(*coherent(seqlen=32), 0.05, block=block)


def test_tokens_that_differ_raise_theta() -> None:
    """Where means say nothing about a tile of keys, going by means alone loses it."""
    q, k, v = coherent(heads=1)
    k[:, 128:144] = torch.randn(1, 16, 1, 32) * 0.1
    k[:, 135] = q[:, :1].mean(1) * 9.0  # one key of a tile without direction that many queries want
    fit = fit_sparge(q, k, v, 0.02, block=BLOCK)
    assert fit.theta[0] > -1.0
    assert fit.density[0] < 1.0


def test_some_tiles_of_queries_are_enough() -> None:
    q, k, v = coherent(seqlen=512)
    all_of_them = fit_sparge(q, k, v, 0.05, block=BLOCK)
    some = fit_sparge(q, k, v, 0.05, block=BLOCK, tiles=8)
    assert max(some.errors) <= 0.05
    assert abs(sum(some.density) - sum(all_of_them.density)) < 0.4


def test_the_frontier_is_what_selections_lose() -> None:
    q, k, _ = coherent(seqlen=64, heads=2, batch=2)
    masses = torch.rand(2, 2, 4, 4).softmax(-1)
    lost, density = frontier(q, k, masses, torch.arange(4), BLOCK, "drop", {})
    assert (lost[-1] == 0).all()
    assert (density[-1] == 1).all()
    assert lost.shape == density.shape
    kept = tw.select_tiles(q, k, tw.Select(tw.Sparge(1.0 - 0.975**2, -1.0), block=BLOCK)).kept
    torch.testing.assert_close(lost[0], (masses * ~kept).sum(-1).mean(-1).amax(0))


def test_tiles_that_the_mask_cuts_count_where_the_rest_has_summaries() -> None:
    torch.manual_seed(0)
    k = torch.randn(1, 64, 1, 32)
    q = -k  # nobody wants the tile on the diagonal
    masses = torch.rand(1, 1, 4, 4).tril()
    (_, dropped), (_, kept) = (
        frontier(q, k, masses, torch.arange(4), BLOCK, far, {"mask": tw.causal}) for far in ("drop", "summary")
    )
    assert dropped[0] == 4 / 10, "one tile for each"
    assert kept[0] == 7 / 10, "and its own"


def test_a_bound_of_nothing_is_refused() -> None:
    q, k, v = coherent(seqlen=32)
    with pytest.raises(InputError, match="max_error"):
        fit_sparge(q, k, v, 0.0)


# windows

CANVASES = [
    Canvas((4, 8), (2, 2)),
    Canvas((3, 4, 6), (1, 2, 3), text=5),
    Canvas((3, 5), (2, 2), order="raster", text=3, text_first=True),
    Canvas((4, 6), (2, 3), order="hilbert"),
]


@pytest.mark.parametrize("canvas", CANVASES, ids=lambda c: f"{c.extents} {c.order}")
def test_losses_and_costs_are_those_of_the_masks(canvas: Canvas) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, canvas.tokens, 2, 16) for _ in range(2))
    windows = canvas.windows()
    assert tuple(canvas.grid) in windows
    losses, costs = window_losses(q, k, canvas, windows), window_costs(canvas, windows)
    weights = torch.einsum("bihd,bjhd->bhij", q, k).mul(16**-0.5).softmax(-1)
    place = torch.arange(canvas.tokens)
    for n, window in enumerate(windows):
        seen = canvas.mask([window] * 2).evaluate(h=torch.tensor(0), i=place[:, None], j=place)
        seen = seen.expand(len(place), len(place))
        want = (weights * ~seen).sum(-1).mean(-1).amax(0)
        torch.testing.assert_close(losses[:, n], want, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(costs[n], seen.double().mean())
        tiles = canvas.tile_of()
        assert torch.equal(seen, seen_tiles(canvas, window)[tiles][:, tiles])


def test_spending_is_close_to_the_best_of_all_choices() -> None:
    generator = torch.Generator().manual_seed(0)
    for budget in (0.2, 0.35, 0.5, 0.9):
        for _ in range(20):
            costs = torch.rand(4, generator=generator, dtype=torch.float64).sort().values * 0.8 + 0.02
            losses = torch.rand(3, 4, generator=generator).sort(1, descending=True).values
            if costs[0] > budget:
                continue
            chosen = spend(losses, costs, budget)
            assert float(costs[chosen].mean()) <= budget * (1 + 1e-9)
            total = sum(float(losses[h, n]) for h, n in enumerate(chosen))
            best = min(
                sum(float(losses[h, n]) for h, n in enumerate(one))
                for one in itertools.product(range(4), repeat=3)
                if float(costs[list(one)].mean()) <= budget
            )
            step = float((losses[:, 0] - losses[:, -1]).max())
            assert total <= best + step
            if budget >= 0.9:
                assert chosen == [3, 3, 3]


def test_a_head_that_needs_more_is_given_more() -> None:
    losses, costs = torch.tensor([[0.9, 0.0], [0.1, 0.0], [0.2, 0.0]]), torch.tensor([0.1, 1.0], dtype=torch.float64)
    assert spend(losses, costs, 0.4) == [1, 0, 0]
    assert spend(losses, costs, 0.7) == [1, 0, 1]


def test_two_small_steps_are_worth_more_than_a_large_one() -> None:
    losses = torch.tensor([[1.0, 1.0, 0.0], [0.9, 0.0, 0.0], [0.9, 0.0, 0.0]])
    costs = torch.tensor([0.0, 0.4, 0.9], dtype=torch.float64)
    assert spend(losses, costs, 0.3) == [0, 1, 1]


def test_a_budget_below_the_smallest_window_is_refused() -> None:
    with pytest.raises(InputError, match="budget"):
        spend(torch.rand(2, 2), torch.tensor([0.3, 0.5]), 0.2)


def test_errors_of_windows_and_tokens_of_another_canvas() -> None:
    canvas = CANVASES[0]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
    whole, one = canvas.grid, (1,) * len(canvas.grid)
    errors = window_errors(q, k, v, canvas.mask([whole, one]))
    assert errors[0] < 1e-5 < errors[1]
    with pytest.raises(InputError, match="31 tokens"):
        window_losses(q[:, 1:], k, canvas, [one])
