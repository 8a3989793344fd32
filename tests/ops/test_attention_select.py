"""`attention(select=)` on the CPU: tiles that are taken, summaries of the rest, the published choice, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError, TilewiseError
from tilewise.ops.attention import choice, codes, selected
from tilewise.testing import attention_select as cases
from tilewise.testing.attention_select import CASES, SelectCase

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_results_and_gradients(case: SelectCase, dtype: torch.dtype) -> None:
    cases.check(case, dtype, "cpu_tiled")


@pytest.mark.parametrize("name", ["mass_causal", "packed", "summary2"])
def test_the_specification_as_an_implementation(name: str) -> None:
    cases.check(BY_NAME[name], torch.float32, "reference", backward=False)


# which tiles ---------------------------------------------------------------------------------------------------------


def published(q: torch.Tensor, k: torch.Tensor, tau: float, theta: float, rows: int, columns: int) -> torch.Tensor:
    """SpargeAttention's first stage as its paper has it, for one head under a causal mask, in float64 by loops."""
    tiles_q, tiles_k = q.double().split(rows), k.double().split(columns)

    def alike(tile: torch.Tensor) -> float:
        unit = tile / tile.norm(dim=-1, keepdim=True)
        return float((unit @ unit.T).mean())

    found = torch.zeros(len(tiles_q), len(tiles_k), dtype=torch.bool)
    for m, queries in enumerate(tiles_q):
        last = m * rows + len(queries) - 1 + len(k) - len(q)
        seen = [n for n in range(len(tiles_k)) if n * columns <= last]
        if alike(queries) <= theta:
            found[m, seen] = True
            continue
        judged = [n for n in seen if alike(tiles_k[n]) > theta]
        found[m, [n for n in seen if n not in judged]] = True
        if not judged:
            continue
        scores = torch.stack([queries.mean(0) @ tiles_k[n].mean(0) for n in judged]) / math.sqrt(q.shape[1])
        p = torch.softmax(scores, 0)
        total = 0.0
        for at in torch.argsort(p, descending=True).tolist():
            found[m, judged[at]] = True
            total += float(p[at])
            if total >= tau:
                break
    return found


@pytest.mark.parametrize(("tau", "theta"), [(0.5, -1.0), (0.9, 0.05), (0.3, 0.08), (1.0, 0.5)])
@pytest.mark.parametrize("lengths", [(150, 150), (70, 131)])
def test_the_published_choice(tau: float, theta: float, lengths: tuple[int, int]) -> None:
    case = SelectCase("choice", tw.Select(tw.Sparge(tau, theta), block=(32, 16)), lengths=(lengths,) * 2)
    q, k, _ = cases.make_inputs(case, torch.float32)
    kept = tw.select_tiles(q, k, case.select, mask=tw.causal).kept
    assert 0.1 < float(kept.float().mean()) < 1.0
    for b in range(2):
        for h in range(4):
            want = published(q.detach()[b, :, h], k.detach()[b, :, h // 2], tau, theta, 32, 16)
            assert torch.equal(kept[b, h], want), (b, h)


def test_packed_sequences_choose_as_they_would_alone() -> None:
    case = BY_NAME["packed_mass"]
    q, k, _ = cases.make_inputs(case, torch.float32)
    arguments = cases.arguments_of(case)
    maps = cases.kept_of(case, tw.select_tiles(q, k, case.select, **arguments))
    del arguments["layout"]
    start_q = start_k = 0
    for (length_q, length_k), kept in zip(case.lengths, maps, strict=True):
        alone = (q[None, start_q : start_q + length_q], k[None, start_k : start_k + length_k])
        if length_q and length_k:
            want = tw.select_tiles(*alone, case.select, **arguments).kept[0]
            assert torch.equal(kept, want.expand_as(kept))
        start_q, start_k = start_q + length_q, start_k + length_k


def test_a_group_shares_its_tiles() -> None:
    q, k, _ = cases.make_inputs(BY_NAME["share"], torch.float32)
    apart = tw.select_tiles(q, k, tw.TopK(2)).kept
    shared = tw.select_tiles(q, k, tw.Select(tw.TopK(2), share_group=True)).kept
    assert torch.equal(shared, apart.view(2, 2, 2, *apart.shape[2:]).any(2))


def test_density() -> None:
    q, k, _ = cases.make_inputs(BY_NAME["count"], torch.float32)
    selected = tw.select_tiles(q, k, tw.Select(tw.TopK(1), block=50), mask=tw.causal)
    assert float(selected.density()) == 3 / 6  # one of one, of two and of three
    assert float(tw.select_tiles(q, k, tw.Sparge(1.0)).density()) == 1.0


def test_what_comes_later_does_not_matter() -> None:
    """Keys and queries behind a tile change nothing in it."""
    for select in (tw.Sparge(0.4, 0.05), tw.Select(tw.TopK(0.3), far="summary2")):
        case = SelectCase("future", tw.Select(*_parts(select), block=32, far=_far(select)), lengths=((160, 160),))
        q, k, v = (x.detach() for x in cases.make_inputs(case, torch.float32))
        o = tw.attention(q, k, v, mask=tw.causal, select=case.select)
        for x in (q, k, v):
            x[:, 96:] = torch.randn(x[:, 96:].shape, generator=torch.Generator().manual_seed(2)) * 3
        again = tw.attention(q, k, v, mask=tw.causal, select=case.select)
        assert torch.equal(o[:, :96], again[:, :96])
        assert not torch.equal(o[:, 96:], again[:, 96:])


def _parts(select: Any) -> tuple[Any, ...]:
    return select.parts if isinstance(select, tw.Select) else (select,)


def _far(select: Any) -> str:
    return select.far if isinstance(select, tw.Select) else "drop"


# what stands for the rest --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", ["drop", "summary", "summary2"])
def test_with_every_tile_taken_it_is_plain_attention(far: str) -> None:
    q, k, v = cases.make_inputs(BY_NAME["mass"], torch.float32)
    o, lse = tw.attention_with_lse(q, k, v, mask=tw.causal, select=tw.Select(tw.Sparge(1.0), block=32, far=far))
    want, want_lse = tw.attention_with_lse(q, k, v, mask=tw.causal, impl="cpu_tiled")
    assert torch.equal(o, want)
    torch.testing.assert_close(lse, want_lse, rtol=2.0**-23, atol=2.0**-22)


def drifting(alpha: float, noise: float) -> tuple[torch.Tensor, ...]:
    """64 tiles of 48 tokens around centres of a random walk; queries near theirs by alpha."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    centres = (draw(64, 1, 128) * 0.5).cumsum(0)
    centres = (centres - centres.mean(0)) / centres.std()
    k = centres + noise * draw(64, 48, 128)
    v = (draw(64, 1, 128) * 0.3).cumsum(0) + noise * draw(64, 48, 128)
    q = draw(64, 48, 128) + alpha * centres
    return tuple(x.reshape(1, -1, 1, 128) for x in (q, k, v))


@pytest.mark.parametrize("alpha", [0.6, 0.4, 0.25])
def test_summaries_of_tiles_that_are_alike(alpha: float) -> None:
    """Where near tiles hold 20 to 45 % of the weights, dropping the rest is off by a fifth or so, and one key for each
    tile by at most 0.03.
    """
    q, k, v = drifting(alpha, 0.5)
    near = tw.mask(lambda b, h, i, j: abs(i // 48 - j // 48) <= 3)
    full, lse = tw.attention_with_lse(q, k, v)
    mass = float(torch.exp(tw.attention_with_lse(q, k, v, mask=near)[1] - lse).mean())
    assert 0.2 <= mass <= 0.45
    off = {}
    for far in ("drop", "summary", "summary2"):
        o = tw.attention(q, k, v, select=tw.Select(near, block=48, far=far))
        off[far] = float((o - full).abs().sum() / full.abs().sum())
    assert off["drop"] >= 0.18
    assert off["summary"] <= 0.03
    assert off["summary2"] <= 0.5 * off["summary"]


# what it goes with ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [tw.Sage2(), tw.Sage1(), tw.FA3FP8()], ids=str)
def test_in_few_bits(scheme: Any) -> None:
    """The codes of all keys, and of these the tiles that are taken."""
    q, k, v = (x.detach() for x in cases.make_inputs(BY_NAME["mass"], torch.float32))
    selected = tw.select_tiles(q, k, tw.Select(tw.TopK(2), block=32))
    o = tw.attention(q, k, v, quantize=scheme, select=selected)
    assert torch.equal(o, tw.attention(q, k, v, quantize=scheme, mask=tw.blocks(selected.kept, 32)))
    far = tw.attention(
        q, k, v, quantize=scheme, select=tw.Select(tw.TopK(2), block=32, far="summary"), impl="cpu_codes"
    )
    exact = tw.attention(q, k, v, select=tw.Select(tw.TopK(2), block=32, far="summary"))
    assert float((far - exact).norm()) < 0.1 * float(exact.norm())


@pytest.mark.parametrize("lengths", [(512, 384), (300, 650), (1, 129)], ids=str)
@pytest.mark.parametrize("theta", [-1.0, 0.05], ids=str)
def test_codes_are_made_once_and_their_sums_predict(
    lengths: tuple[int, int], theta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 64 queries and 128 keys become codes; tiles are of one or more of these."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(2, n, heads, 16, generator=generator)
        for n, heads in zip((*lengths, lengths[1]), (4, 2, 2), strict=True)
    )
    q, k = q + 1.0, k + 0.5
    select = tw.Select(tw.Sparge(0.7, theta), block=(128, 128))
    want = tw.attention(q, k, v, quantize=tw.Sage2(), select=tw.select_tiles(q, k, select))
    made: list[Any] = []
    encode, count = selected.quantize_qkv, codes.codes_of
    monkeypatch.setattr(selected, "quantize_qkv", lambda *a, **b: made.append(encode(*a, **b)) or made[-1])
    monkeypatch.setattr(codes, "codes_of", lambda *a, **b: made.append(count(*a, **b)) or made[-1])
    monkeypatch.setattr(choice, "tile_means", None)
    assert torch.equal(tw.attention(q, k, v, quantize=tw.Sage2(), select=select), want)
    assert len(made) == 1


def test_a_selection_made_before_serves_other_queries() -> None:
    q, k, v = cases.make_inputs(BY_NAME["mass"], torch.float32)
    selected = tw.select_tiles(q, k, tw.Select(tw.TopK(2), block=32))
    other = torch.randn(q.shape, generator=torch.Generator().manual_seed(9))
    o = tw.attention(other, k, v, select=selected)
    assert torch.equal(o, tw.attention(other, k, v, mask=tw.blocks(selected.kept, 32)))


@pytest.mark.parametrize("name", ["mass_causal", "packed", "summary2", "weight"])
def test_compiled_whole(name: str) -> None:
    case = BY_NAME[name]
    q, k, v = cases.make_inputs(case, torch.float32)
    arguments = cases.arguments_of(case)

    def double(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, k, v, select=case.select, **arguments) * 2

    found = torch.compile(double, fullgraph=True, backend="aot_eager")(q, k, v)
    want = double(q, k, v)
    torch.testing.assert_close(found, want)
    for got, right in zip(
        torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(want.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(got, right)


def test_why_knows_the_selection() -> None:
    q, k, v = (x.detach() for x in cases.make_inputs(BY_NAME["mass"], torch.float32))
    assert tw.why(q, k, v).chosen == "cpu_sdpa"
    assert tw.why(q, k, v, select=tw.TopK(2)).chosen == "cpu_tiled"


@pytest.mark.parametrize("lengths", [(0, 9), (9, 0), (0, 0)])
@pytest.mark.parametrize("far", ["drop", "summary"])
def test_nothing_to_do(lengths: tuple[int, int], far: str) -> None:
    q, k = torch.randn(2, lengths[0], 4, 16), torch.randn(2, lengths[1], 2, 16)
    o, lse = tw.attention_with_lse(q, k, k, select=tw.Select(tw.Sparge(), far=far))
    assert torch.equal(o, torch.zeros_like(q))
    assert bool((lse == -torch.inf).all())


def _without_pairs(layout: str) -> tuple[torch.Tensor, torch.Tensor, Any]:
    ends = torch.tensor([0, 0, 150], dtype=torch.int32)
    if layout == "dense":
        return torch.randn(0, 150, 2, 16), torch.randn(0, 150, 2, 16), None
    if layout == "packed":
        return torch.randn(0, 2, 16), torch.randn(150, 2, 16), tw.Packed(ends * 0, ends)
    table = torch.zeros(2, 8, dtype=torch.int32)
    return torch.randn(2, 1, 2, 16), torch.randn(8, 32, 2, 16), tw.Paged(table, ends[:2])


@pytest.mark.parametrize("select", [tw.Sparge(0.5), tw.TopK(2), tw.Select(tw.TopK(1), far="summary", block=16)])
@pytest.mark.parametrize("layout", ["dense", "packed", "paged"])
def test_formulas_of_other_sizes_are_not_read_without_pairs(layout: str, select: Any) -> None:
    """Nothing proves that their indices stay inside, nor that they divide by no 0."""
    q, k, where = _without_pairs(layout)
    few, none = torch.randn(1), torch.zeros(0, dtype=torch.int32)
    for mask in (None, lambda b, h, i, j: none[j] == i, lambda b, h, i, j: i % (few[h] * 0).int() == 0):
        for score in (None, lambda s, b, h, i, j: s + few[j] * few[h]):
            o = tw.attention(q, k, k, mask=mask, score=score, layout=where, select=select)
            assert torch.equal(o, torch.zeros_like(q))


def test_errors() -> None:
    q, k, v = (x.detach() for x in cases.make_inputs(BY_NAME["mass"], torch.float32))
    far, far2 = (tw.Select(tw.TopK(1), far=far) for far in ("summary", "summary2"))
    short = tw.select_tiles(q[:, :50], k, tw.TopK(1))
    for changes, name in (
        ({"select": "sparge"}, "select"),
        ({"select": far, "dropout": 0.1}, "dropout"),
        ({"select": far2, "score": tw.softcap(3.0)}, "select far"),
        ({"select": short}, "select"),
        ({"select": tw.Sparge((0.5, 0.6))}, "Sparge tau"),
        ({"select": tw.Sparge(lam=(5.0, 6.0, 7.0))}, "Sparge lam"),
        ({"select": tw.Select(tw.Sparge(lam=(5.0, 6.0)), tw.Sparge(lam=(1.0,) * 4))}, "Sparge lam"),
        ({"select": tw.TopK(1, theta=(0.1, 0.2, 0.3))}, "TopK theta"),
        ({"select": tw.TopK(1), "mask": torch.ones(2, 2)}, "mask"),
        ({"select": tw.TopK(1), "scale": "big"}, "scale"),
    ):
        with pytest.raises(TilewiseError, match=f"^{name}: got"):
            tw.attention(q, k, v, **changes)
    with pytest.raises(InputError, match=r"^select: got"):
        tw.select_tiles(q, k, None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^k: got"):
        tw.attention(q, k[..., :8], v, select=tw.TopK(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_small_weights_are_left_out(dtype: torch.dtype) -> None:
    cases.check_left_out(dtype, "cpu_tiled")


@pytest.mark.parametrize("scheme", [tw.Sage2(), tw.FA3FP8(), tw.Sage1()], ids=repr)
def test_small_weights_of_codes_are_left_out(scheme: tw.Sage | tw.FP8) -> None:
    cases.check_left_out(torch.float32, "cpu_codes", quantize=scheme)


def test_who_leaves_nothing_out_says_so() -> None:
    q, k, v = (x.detach() for x in cases.make_inputs(BY_NAME["mass"], torch.float32))
    with pytest.raises(TilewiseError, match=r"no Sparge\(lam=\)"):
        tw.attention(q, k, v, select=tw.Sparge(lam=5.0), impl="reference")
    assert tw.select_tiles(q, k, tw.Select(tw.Sparge(lam=5.0), tw.window(9))).skip == 5.0
    by_head = tw.Select(tw.Sparge(lam=(1.0, 6.0, 2.0, 9.0)), tw.Sparge(0.5, lam=4.0))
    assert tw.select_tiles(q, k, by_head).skip == (4.0, 6.0, 4.0, 9.0)
    assert tw.select_tiles(q, k, tw.Select(tw.Sparge(lam=5.0), tw.TopK(1))).skip is None


def test_alike_beyond_one_is_not_alike_enough() -> None:
    """Rows that are parallel have a similarity of 1, or by rounding a little more: theta=1 takes each tile."""
    torch.manual_seed(1)
    rows = torch.randn(1, 1, 1, 64).expand(1, 256, 1, 64).contiguous()
    for part in (tw.TopK(1.0 / 16, theta=1.0), tw.Sparge(0.1, theta=1.0), tw.Threshold(0.9, theta=1.0)):
        assert float(tw.select_tiles(rows, rows, tw.Select(part, block=16)).density()) == 1.0


def test_squares_leave_float16_unharmed() -> None:
    q, k = torch.zeros(1, 256, 1, 64, dtype=torch.float16), torch.randn(1, 256, 1, 64).half()
    q[..., 3], k[..., 3] = 3000.0, 0.01 * k[..., 3]
    select = tw.Select(tw.TopK(1), block=32, far="summary2")
    o = tw.attention(q, k, k, select=select)
    assert o.dtype == torch.float16
    torch.testing.assert_close(
        o.float(), tw.attention(q.float(), k.float(), k.float(), select=select), atol=4e-3, rtol=0
    )


@pytest.mark.parametrize("far", ["drop", "summary", "summary2"])
@pytest.mark.parametrize("packed", [False, True])
def test_tiles_of_another_call_obey_this_ones_mask(far: str, packed: bool) -> None:
    """What stands for tiles that were not taken, too: of a tile that a mask cuts nothing stands for anything."""
    shape = (128, 2, 16) if packed else (1, 128, 2, 16)
    q, k, v = (torch.randn(shape) for _ in range(3))
    starts = torch.tensor([0, 50, 128], dtype=torch.int32)
    more = {"layout": tw.Packed(starts, starts)} if packed else {}
    select = tw.Select(tw.TopK(1), block=16, far=far)
    tiles = tw.select_tiles(q, k, select, **more)
    later = v.clone()
    later[..., 100:, :, :] += 100.0
    one, other = (tw.attention(q, k, x, mask=tw.causal, select=tiles, **more) for x in (v, later))
    assert torch.equal(one[..., :100, :, :], other[..., :100, :, :])


def test_packed_tiles_are_of_these_lengths() -> None:
    q, k, v = (torch.randn(64, 1, 16) for _ in range(3))

    def layout(*starts: int) -> tw.Packed:
        return tw.Packed(*(torch.tensor(starts, dtype=torch.int32) for _ in range(2)))

    tiles = tw.select_tiles(q, k, tw.Select(tw.TopK(1), block=16), layout=layout(0, 32, 64))
    tw.attention(q, k, v, select=tiles, layout=layout(0, 32, 64))
    for starts in ((0, 16, 64), (0, 64), (0, 32, 40, 64)):
        with pytest.raises(InputError, match="lengths of each"):
            tw.attention(q, k, v, select=tiles, layout=layout(*starts))


@pytest.mark.parametrize("far", ["drop", "summary"])
def test_a_group_shares_tiles_under_a_mask_of_each_head(far: str) -> None:
    q, k, v = (torch.randn(1, 64, heads, 16) for heads in (4, 2, 2))
    mask = tw.mask(lambda b, h, i, j: (j <= i) | (h == 0))
    select = tw.Select(tw.TopK(1), block=16, far=far, share_group=True)
    tiles = tw.select_tiles(q, k, select, mask=mask)
    assert 0.0 < float(tiles.density()) < 1.0
    torch.testing.assert_close(
        tw.attention(q, k, v, mask=mask, select=select), tw.attention(q, k, v, mask=mask, select=tiles)
    )


def test_nothing_and_wide_heads() -> None:
    q = torch.randn(0, 64, 2, 16)
    assert tw.attention(q, q, q, select=tw.TopK(1)).shape == q.shape
    q = torch.randn(1, 32, 1, 300)
    with pytest.raises(InputError, match="head_dim of at most 256"):
        tw.attention(q, q, q, select=tw.Select(tw.TopK(1), block=16, far="summary2"))
