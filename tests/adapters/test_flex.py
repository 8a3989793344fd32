"""The FlexAttention adapter against PyTorch's FlexAttention on the CPU, for the library's masks and scores."""

from __future__ import annotations

import inspect
import math
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import tilewise as tw
from tests.adapters.dense import as_double, as_leaves, assert_close, dense, leaves
from tilewise.adapters import flex
from tilewise.core.errors import FormulaError, InputError, UnsupportedError
from tilewise.schedule.tilemap import TileMap

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without:UserWarning", "ignore:return_lse is deprecated:FutureWarning"
)
N, HEADS, BATCH = 67, 4, 2
IDS = torch.tensor([[0] * 20 + [1] * 30 + [2] * 17, [0] * 5 + [1] * 62])
PREFIX = torch.tensor([9, 40])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.06])
TABLE = torch.randn(8, HEADS, generator=torch.Generator().manual_seed(2))
BIAS = torch.randn(BATCH, HEADS, N, N, generator=torch.Generator().manual_seed(3))
MAP = torch.rand(3, 3, generator=torch.Generator().manual_seed(4)) > 0.4
KEEP = torch.rand(N, N, generator=torch.Generator().manual_seed(5)) > 0.5
ENTRY, EXIT = tw.tree_times([(n - 1) // 2 for n in range(N)])


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """PyTorch's FlexAttention as it is written, without the seconds that Dynamo takes for each new function."""
    if "through_dynamo" not in request.fixturenames:
        monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture
def through_dynamo() -> None:
    """Asks for PyTorch's FlexAttention as a user calls it in eager mode."""


@dataclass(frozen=True)
class Case:
    """A function as FlexAttention takes it, and the library's name for it at equal lengths."""

    mask_mod: Callable[..., Any] | None = None
    mask: tw.Mask | None = None
    score_mod: Callable[..., Any] | None = None
    score: tw.Score | None = None
    captured: tuple[torch.Tensor, ...] = ()


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def neighborhood(b: Any, h: Any, q: Any, k: Any) -> Any:
    return abs(q.clamp(2, N - 3) - k) <= 2


def t5(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """T5's buckets, 8 of them, both directions, max_distance 20 (exact below 2)."""
    distance = (q - k).abs()
    far = torch.log(torch.clamp(distance, min=1).float() / 2) * (2 / math.log(20 / 2))
    bucket = torch.where(distance < 2, torch.clamp(distance, max=1), torch.clamp(far.to(torch.int32) + 2, max=3))
    return s + TABLE[bucket + torch.where(k > q, 4, 0), h]


CASES = {
    "causal": Case(causal, tw.causal),
    "window": Case(lambda b, h, q, k: (q - k < 16) & (q >= k), tw.window(16)),
    "window both sides": Case(lambda b, h, q, k: (q - k < 16) & (k - q <= 5), tw.window(16, 5)),
    "chunked": Case(torch_flex.and_masks(causal, lambda b, h, q, k: q // 16 == k // 16), tw.causal & tw.chunked(16)),
    "prefix": Case(torch_flex.or_masks(causal, lambda b, h, q, k: k < PREFIX[b]), tw.causal | tw.prefix(PREFIX)),
    "lengths": Case(lambda b, h, q, k: k < PREFIX[b], tw.lengths(PREFIX)),
    "document": Case(lambda b, h, q, k: IDS[b, q] == IDS[b, k], tw.document(IDS)),
    "tree": Case(lambda b, h, q, k: (ENTRY[k] <= ENTRY[q]) & (EXIT[q] <= EXIT[k]), tw.tree(ENTRY, EXIT)),
    "dilated": Case(lambda b, h, q, k: ((q - k) % 3 == 0) & (q >= k), tw.dilated(3) & tw.causal),
    "blocks": Case(lambda b, h, q, k: MAP[q // 32, k // 32], tw.blocks(MAP, 32)),
    "explicit": Case(lambda b, h, q, k: KEEP[q, k], tw.explicit(KEEP)),
    "by head": Case(lambda b, h, q, k: (h % 2 == 0) | (q >= k)),
    "neighborhood": Case(neighborhood, tw.neighborhood((N,), (5,))),
    "noop": Case(torch_flex.noop_mask),
    "alibi": Case(
        causal, tw.causal, lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(), tw.alibi(SLOPES), captured=(SLOPES,)
    ),
    "softcap": Case(causal, tw.causal, lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0), tw.softcap(2.0)),
    "relative bias": Case(None, None, t5, tw.relative_bias(TABLE, max_distance=20), captured=(TABLE,)),
    "bias": Case(None, None, lambda s, b, h, q, k: s + BIAS[b, h, q, k], tw.bias(BIAS), captured=(BIAS,)),
    "tanh": Case(None, None, lambda s, b, h, q, k: torch.tanh(s), tw.tanh_score()),
    "sigmoid": Case(None, None, lambda s, b, h, q, k: torch.sigmoid(s), tw.sigmoid_score()),
}


def theirs(
    case: Case, tensors: list[torch.Tensor], block: int = 32, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of PyTorch's FlexAttention."""
    mask = None
    if case.mask_mod is not None:
        sizes = (tensors[0].shape[-2], tensors[1].shape[-2])
        mask = torch_flex.create_block_mask(case.mask_mod, BATCH, HEADS, *sizes, device="cpu", BLOCK_SIZE=block)
    with torch.no_grad():
        o, aux = torch_flex.flex_attention(
            *(x.detach() for x in tensors), case.score_mod, mask, return_aux=torch_flex.AuxRequest(lse=True), **options
        )
    return o, aux.lse


def ours(case: Case, tensors: list[torch.Tensor], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = (tensors[0].shape[-2], tensors[1].shape[-2])
    mask = None if case.mask_mod is None else flex.create_block_mask(case.mask_mod, BATCH, HEADS, *sizes, device="cpu")
    o, aux = flex.flex_attention(*tensors, case.score_mod, mask, return_aux=flex.AuxRequest(lse=True), **options)
    return o, aux.lse


@pytest.mark.parametrize("name", CASES)
def test_forward_equals_pytorchs(name: str) -> None:
    case = CASES[name]
    tensors = [x.detach() for x in leaves((BATCH, HEADS, N, 16), (BATCH, 2, N, 16), (BATCH, 2, N, 8))]
    found = ours(case, tensors, enable_gqa=True)
    reference = theirs(case, [x.double() for x in tensors], enable_gqa=True)
    plain = theirs(case, tensors, enable_gqa=True)
    for what, x, exact, same in zip(("o", "lse"), found, reference, plain, strict=True):
        assert_close(x, exact, same, what)
    if case.mask is not None or case.score is not None:  # the library's own name for it, given to the same functions
        mask = None if case.mask is None else flex.create_block_mask(case.mask, BATCH, HEADS, N, N, device="cpu")
        named = flex.flex_attention(*tensors, case.score, mask, enable_gqa=True)
        assert_close(named, reference[0], plain[0], "by name")


@pytest.mark.parametrize("sizes", [(40, 150), (150, 40)], ids=str)
@pytest.mark.parametrize("name", ["causal", "window", "softcap"])
def test_lengths_that_differ_use_raw_indices(name: str, sizes: tuple[int, int]) -> None:
    case = CASES[name]
    tensors = [x.detach() for x in leaves((BATCH, HEADS, sizes[0], 16), *[(BATCH, HEADS, sizes[1], 16)] * 2)]
    found, reference = ours(case, tensors, scale=0.5), theirs(case, [x.double() for x in tensors], scale=0.5)
    for what, x, exact, same in zip(("o", "lse"), found, reference, theirs(case, tensors, scale=0.5), strict=True):
        assert_close(x, exact, same, what)


@pytest.mark.parametrize("sizes", [(67, 67), (30, 67)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_autograds(name: str, sizes: tuple[int, int]) -> None:
    """PyTorch's FlexAttention has no backward on the CPU: float64 autograd through the written-out form instead."""
    case = CASES[name]
    shapes = ((BATCH, HEADS, sizes[0], 16), *[(BATCH, HEADS, sizes[1], 16)] * 2)
    grid = torch.meshgrid(*(torch.arange(n) for n in (BATCH, HEADS, *sizes)), indexing="ij")
    visible = None if case.mask_mod is None else case.mask_mod(*grid).expand(BATCH, HEADS, *sizes)

    changed = []  # scores as the score_mod made them

    def loss_of(o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return o.square().sum() + lse[lse > -torch.inf].sum()

    def run(function: Callable[..., Any], inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        o, lse = function(inputs)
        return (o, *torch.autograd.grad(loss_of(o, lse), [*inputs, *case.captured]))

    def change(s: torch.Tensor) -> torch.Tensor:
        changed.append(s if case.score_mod is None else case.score_mod(s, *grid))
        return changed[-1]

    def written_out(inputs: list[torch.Tensor]) -> Any:
        return dense(*inputs, visible, change)[:2]

    def absolute_terms(inputs: list[torch.Tensor]) -> float:
        """Largest sum of the absolute terms of a captured tensor's gradient, one term a pair."""
        loss = loss_of(*written_out(inputs))
        (of_scores,) = torch.autograd.grad(loss, changed[-1], retain_graph=True)
        grads = torch.autograd.grad(changed[-1], case.captured, of_scores.abs()) if case.captured else ()
        return max((float(g.abs().max()) for g in grads), default=0.0)

    for x in case.captured:
        x.requires_grad_()
    try:
        tensors = leaves(*shapes)
        results = [run(lambda x: ours(case, x), tensors)]
        results += [run(written_out, made(tensors)) for made in (as_double, as_leaves)]
        size = absolute_terms(as_double(tensors))
    finally:
        for x in case.captured:
            x.requires_grad_(False)
    names = ("o", "dq", "dk", "dv", "captured")
    for what, x, exact, same in zip(names, *results, strict=False):
        assert_close(x, exact.double(), same, what, size if what == "captured" else 0.0)


def test_block_mask_has_pytorchs_tiles() -> None:
    """Exact classes where interval arithmetic is tight; and PyTorch's own flex_attention runs on the lists."""
    for name in ("causal", "window", "window both sides", "chunked", "prefix", "document"):
        case = CASES[name]
        assert case.mask_mod is not None
        sizes = (BATCH, HEADS, N, N)
        mine = flex.create_block_mask(case.mask_mod, *sizes, device="cpu", BLOCK_SIZE=(16, 8))
        other = torch_flex.create_block_mask(case.mask_mod, *sizes, device="cpu", BLOCK_SIZE=(16, 8))
        assert isinstance(mine, torch_flex.BlockMask)
        assert torch.equal(mine.to_dense(), other.to_dense())
        assert torch.equal(mine.full_kv_num_blocks, other.full_kv_num_blocks)
        assert mine.shape == other.shape
        assert mine.numel() == other.numel()
        classes = TileMap.from_block_mask(other).classes
        assert torch.equal(TileMap.from_block_mask(mine).classes, classes)
        assert torch.equal((mine.to_tile_map().classes > 0).expand_as(classes), classes > 0)
        assert torch.equal(mine[0, 1].kv_num_blocks, other[0, 1].kv_num_blocks)
        assert mine.sparsity() == pytest.approx(other.sparsity())


@pytest.mark.parametrize(("queries", "keys", "block"), [(100, 100, 64), (200, 130, (64, 128)), (64, 64, 128)])
def test_sparsity_is_pytorchs_where_tiles_reach_beyond_a_length(queries: int, keys: int, block: Any) -> None:
    given = (lambda b, h, i, j: (i >= j) & (h < 1), 2, 2, queries, keys)
    mine = flex.create_block_mask(*given, device="cpu", BLOCK_SIZE=block)
    other = torch_flex.create_block_mask(*given, device="cpu", BLOCK_SIZE=block)
    assert mine.sparsity() == pytest.approx(other.sparsity())


@pytest.mark.usefixtures("through_dynamo")
@pytest.mark.parametrize("source", ["function", "Mask"])
def test_our_block_mask_runs_in_pytorchs_flex_attention(source: str) -> None:
    tensors = [x.detach() for x in leaves((1, 2, 40, 8), (1, 2, N, 8), (1, 2, N, 8))]
    given = CASES["causal"].mask_mod if source == "function" else tw.causal & tw.window(30)
    mask = flex.create_block_mask(given, None, None, 40, N, device="cpu", BLOCK_SIZE=16)
    o = torch_flex.flex_attention(*(x.double() for x in tensors), block_mask=mask)
    assert_close(flex.flex_attention(*tensors, block_mask=mask), o, o.float())
    if source == "Mask":  # which stays aligned to the bottom right
        direct = tw.attention(*(x.transpose(1, 2) for x in tensors), mask=given).transpose(1, 2)
        assert_close(direct, o, o.float())


def test_pytorchs_block_mask_is_accepted() -> None:
    tensors = [x.detach() for x in leaves((BATCH, 2, N, 8), (BATCH, 2, N, 8), (BATCH, 2, N, 8))]
    for name in ("causal", "document", "by head", "blocks"):
        mask = torch_flex.create_block_mask(CASES[name].mask_mod, BATCH, 2, N, N, device="cpu", BLOCK_SIZE=16)
        expected = torch_flex.flex_attention(*(x.double() for x in tensors), block_mask=mask)
        plain = torch_flex.flex_attention(*tensors, block_mask=mask)
        for _ in range(2):
            assert_close(flex.flex_attention(*tensors, block_mask=mask), expected, plain, name)
        lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        options = {"BLOCK_SIZE": 16, "mask_mod": mask.mask_mod, "seq_lengths": (N, N)}
        again = flex.BlockMask.from_kv_blocks(*lists, **options)
        assert_close(flex.flex_attention(*tensors, block_mask=again), expected, plain, f"{name}, from_kv_blocks")


@pytest.mark.parametrize("mask_mod", [None, causal], ids=["lists alone", "lists and function"])
def test_lists_of_a_block_mask_count(mask_mod: Callable[..., Any] | None) -> None:
    """from_kv_blocks: tiles that are not listed are hidden, whatever the function says; full ones are seen whole."""
    visited = torch.tensor([[0, 1, 0], [1, 0, 1], [1, 1, 0]])
    full = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 0]])

    def lists(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.argsort(tiles, dim=-1, descending=True, stable=True)
        return tiles.sum(-1).int()[None, None], order.int()[None, None]

    mask = torch_flex.BlockMask.from_kv_blocks(
        *lists(visited), *lists(full), BLOCK_SIZE=(16, 16), mask_mod=mask_mod, seq_lengths=(48, 48)
    )
    tensors = [x.detach() for x in leaves((1, 2, 48, 8), (1, 2, 48, 8), (1, 2, 48, 8))]
    wide = [x.repeat_interleave(16, 0).repeat_interleave(16, 1).bool() for x in (visited, full)]
    inside = wide[0] if mask_mod is None else wide[0] & torch.ones(48, 48, dtype=torch.bool).tril()
    reference, _, _ = dense(*(x.double() for x in tensors), wide[1] | inside)
    assert_close(flex.flex_attention(*tensors, block_mask=mask), reference, dense(*tensors, wide[1] | inside)[0])


def test_a_block_mask_of_no_batch_is_pytorchs() -> None:
    made = [x.create_block_mask(causal, 0, 2, 20, 30, device="cpu", BLOCK_SIZE=16) for x in (flex, torch_flex)]
    assert made[0].shape == made[1].shape == (0, 2, 20, 30)
    assert made[0].kv_num_blocks.shape == made[1].kv_num_blocks.shape
    o = flex.flex_attention(torch.zeros(0, 2, 20, 8), *torch.zeros(2, 0, 2, 30, 8), block_mask=made[0])
    assert o.shape == (0, 2, 20, 8)


def test_no_dense_mask_is_built() -> None:
    """65,536 x 65,536 pairs would take 4 GiB; the formula takes some KB, its tile classes 262,144 bytes."""
    tracemalloc.start()
    mask = flex.create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 1024), None, None, 65536, 65536, device="cpu")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert mask.to_tile_map().classes.numel() == 512 * 512
    # a row of 128 queries sees its own tile, 7 full ones and the oldest, partly
    assert mask.kv_num_blocks[0, 0, 100] + mask.full_kv_num_blocks[0, 0, 100] == 9


def test_an_assigned_mask_mod_is_the_mask() -> None:
    tensors = [x.detach() for x in leaves((1, 2, N, 8), (1, 2, N, 8), (1, 2, N, 8))]
    found = []
    for library in (flex, torch_flex):
        mask = library.create_block_mask(causal, None, None, N, N, device="cpu", BLOCK_SIZE=16)
        mask.mask_mod = torch_flex.and_masks(mask.mask_mod, lambda b, h, q, k: q - k < 9)
        found.append(mask)
    expected, plain = (torch_flex.flex_attention(*(x.to(dtype) for x in tensors), block_mask=found[1])
                       for dtype in (torch.float64, torch.float32))  # fmt: skip
    assert_close(flex.flex_attention(*tensors, block_mask=found[0]), expected, plain)


def test_block_masks_can_be_pickled() -> None:
    for source in (causal, tw.causal & tw.window(5), tw.prefix(PREFIX)):
        mask = flex.create_block_mask(source, BATCH, None, 40, N, device="cpu", BLOCK_SIZE=16)
        again = pickle.loads(pickle.dumps(mask))
        assert torch.equal(again.to_tile_map().classes, mask.to_tile_map().classes)
        assert (again.shape, again.BLOCK_SIZE, repr(again)) == (mask.shape, mask.BLOCK_SIZE, repr(mask))


def test_autocast_casts_like_pytorch() -> None:
    tensors = [x.detach() for x in leaves((1, 2, 20, 8), (1, 2, 20, 8), (1, 2, 20, 8))]
    with torch.autocast("cpu", torch.bfloat16):
        assert flex.flex_attention(*tensors).dtype == torch_flex.flex_attention(*tensors).dtype == torch.bfloat16
        mixed = flex.flex_attention(tensors[0], *(x.bfloat16() for x in tensors[1:]))
    assert mixed.dtype == torch.bfloat16


def test_pytorchs_block_mask_inside_a_compiled_region(through_dynamo: None) -> None:
    tensors = [x.detach() for x in leaves((1, 2, N, 8), (1, 2, N, 8), (1, 2, N, 8))]
    mask = torch_flex.create_block_mask(causal, None, None, N, N, device="cpu", BLOCK_SIZE=16)
    compiled = torch.compile(lambda *x: flex.flex_attention(*x, block_mask=mask), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), flex.flex_attention(*tensors, block_mask=mask))


def test_moving_a_block_mask_takes_its_tensors_along() -> None:
    mask = flex.create_block_mask(CASES["prefix"].mask_mod, BATCH, None, 40, N, device="cpu")
    assert mask.to("cpu") is mask
    moved = mask.to("meta")
    before, after = mask.mask_for(40, N), moved.mask_for(40, N)
    assert before is not None
    assert after is not None
    assert (after.text, [t.device.type for t in after.tensors]) == (before.text, ["meta"])
    assert [t.device.type for t in before.tensors] == ["cpu"]


def test_return_values_and_shared_keys() -> None:
    q, k, v = (x.detach() for x in leaves((3, 2, 20, 8), (1, 2, 20, 8), (1, 2, 20, 8)))
    mask = flex.create_block_mask(lambda b, h, q, k: q >= k + b, 3, None, 20, 20, device="cpu")
    o, lse = flex.flex_attention(q, k, v, block_mask=mask, return_lse=True)
    expected, expected_lse = (
        torch_flex.flex_attention(q.double(), k.double().expand(3, -1, -1, -1), v.double().expand(3, -1, -1, -1),
                                  block_mask=mask, return_lse=True)
    )  # fmt: skip
    assert lse.shape == (3, 2, 20)
    assert lse.dtype == torch.float32
    assert bool((lse[1, :, 0] == -torch.inf).all())
    assert_close(o, expected, expected.float())
    assert_close(lse, expected_lse, expected_lse.float())
    aux = flex.flex_attention(q, k, v, block_mask=mask, return_aux=flex.AuxRequest())[1]
    assert (aux.lse, aux.max_scores) == (None, None)


@pytest.mark.parametrize("name", ["flex_attention", "create_block_mask"])
def test_signatures_contain_pytorchs(name: str) -> None:
    mine = inspect.signature(getattr(flex, name)).parameters
    other = inspect.signature(getattr(torch_flex, name)).parameters
    assert list(mine)[: len(other)] == list(other)
    for parameter in other:
        assert (mine[parameter].default, mine[parameter].kind) == (other[parameter].default, other[parameter].kind)


def test_bad_input() -> None:
    q, k, v = (x.detach() for x in leaves((1, 4, 20, 8), (1, 2, 20, 8), (1, 2, 20, 8)))
    with pytest.raises(InputError, match="enable_gqa"):
        flex.flex_attention(q, k, v)
    with pytest.raises(InputError, match="query"):
        flex.flex_attention(q[0], k, v)
    mask = flex.create_block_mask(causal, None, None, 20, 21, device="cpu")
    with pytest.raises(InputError, match="block_mask"):
        flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    with pytest.raises(UnsupportedError, match="max_scores"):
        flex.flex_attention(q, k, v, enable_gqa=True, return_aux=flex.AuxRequest(max_scores=True))
    with pytest.raises(InputError, match="return_lse"):
        flex.flex_attention(q, k, v, enable_gqa=True, return_lse=True, return_aux=flex.AuxRequest())
    with pytest.raises(FormulaError, match=r"test_flex\.py"):
        flex.create_block_mask(lambda b, h, q, k: q >= k if b > 0 else k < 3, 1, 1, 20, 20, device="cpu")
    for name, arguments in {
        "B: got -1": {"B": -1},
        "H: got 2.0": {"H": 2.0},
        "Q_LEN: got -1": {"Q_LEN": -1},
        "KV_LEN: got '8'": {"KV_LEN": "8"},
        "BLOCK_SIZE: got 0": {"BLOCK_SIZE": 0},
        "BLOCK_SIZE: got -8": {"BLOCK_SIZE": (16, -8)},
        "BLOCK_SIZE: got '8'": {"BLOCK_SIZE": "8"},
        r"BLOCK_SIZE: got \(1, 2, 3\)": {"BLOCK_SIZE": (1, 2, 3)},
    }.items():
        with pytest.raises(InputError, match=f"create_block_mask {name}.* Hint: "):
            flex.create_block_mask(causal, **{"B": 1, "H": 1, "Q_LEN": 20, "KV_LEN": 20, **arguments}, device="cpu")
    for given in ({"block_mask": "x"}, {"block_mask": tw.causal}, {"return_aux": "x"}):
        with pytest.raises(InputError, match=next(iter(given))):
            flex.flex_attention(q, k, v, enable_gqa=True, **given)
    sliced = torch_flex.create_block_mask(causal, 1, 1, 20, 20, device="cpu")[0:1]
    with pytest.raises(RuntimeError, match="sliced"):
        flex.flex_attention(q, k, v, block_mask=sliced, enable_gqa=True)
