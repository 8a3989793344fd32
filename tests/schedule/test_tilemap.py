"""Tile classes against brute force: sound on anything, tight on the named masks; and to and from FlexAttention."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import tilewise as tw
from tilewise.adapters import flex
from tilewise.core.errors import FormulaError, InputError
from tilewise.formula.formula import Mask, as_mask
from tilewise.formula.library import tree_times
from tilewise.schedule import rule
from tilewise.schedule.tilemap import EMPTY, FULL, PARTIAL, TileMap
from tilewise.testing.cases import CPU_CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.strategies import as_mask_function, bool_trees, captured_tensors

MASKED = [case for case in CPU_CASES if case.mask is not None and case.packed is None and case.seqlen_k < 300]


def brute(mask: Mask, tiles: TileMap, batch: int, heads: int) -> torch.Tensor:
    """The true class of every tile, from every pair."""
    shift = tiles.seqlen_k - tiles.seqlen_q
    visible = mask.evaluate(
        dtype=torch.float32,
        b=torch.arange(batch)[:, None, None, None],
        h=torch.arange(heads)[:, None, None],
        i=torch.arange(shift, tiles.seqlen_k)[:, None],
        j=torch.arange(tiles.seqlen_k),
    ).expand(batch, heads, tiles.seqlen_q, tiles.seqlen_k)
    rows = []
    for q in range(0, tiles.seqlen_q, tiles.block_m):
        columns = []
        for k in range(0, tiles.seqlen_k, tiles.block_n):
            tile = visible[..., q : q + tiles.block_m, k : k + tiles.block_n].flatten(2)
            columns.append(torch.where(tile.all(-1), FULL, torch.where(tile.any(-1), PARTIAL, EMPTY)))
        rows.append(torch.stack(columns, -1))
    return torch.stack(rows, -2).to(torch.int8)


def check_sound(mask: Mask, tiles: TileMap, batch: int, heads: int) -> None:
    truth = brute(mask, tiles, batch, heads)
    got = tiles.classes.expand_as(truth)
    wrong = (got != truth) & (got != PARTIAL)
    assert not bool(wrong.any()), f"{int(wrong.sum())} tiles are called FULL or EMPTY and are not"


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, int]:
    block = st.sampled_from([1, 3, 8, 16, 32])
    return {
        "seqlen_q": draw(st.integers(1, 70)),
        "seqlen_k": draw(st.integers(1, 70)),
        "block_m": draw(block),
        "block_n": draw(block),
    }


@given(tree=bool_trees(), size=sizes())
def test_sound_on_random_masks(tree: Any, size: dict[str, int]) -> None:
    mask = tw.mask(as_mask_function(tree, captured_tensors()))
    check_sound(mask, TileMap.build(mask, batch=2, heads=3, **size), 2, 3)


@pytest.mark.parametrize("block", [(16, 16), (32, 8), (7, 20), (128, 128)], ids=str)
@pytest.mark.parametrize("case", MASKED, ids=repr)
def test_sound_on_every_named_mask(case: Any, block: tuple[int, int]) -> None:
    inputs = make_inputs(case, torch.float32)
    mask = as_mask(inputs.mask.formula)  # type: ignore[union-attr]
    tiles = TileMap.build(
        mask, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k, batch=case.batch, heads=case.heads_q,
        block_m=block[0], block_n=block[1],
    )  # fmt: skip
    check_sound(mask, tiles, case.batch, case.heads_q)


SORTED_IDS = torch.arange(128) // 24
PREFIXES = torch.tensor([0, 37, 128])
BLOCKS = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.4
EXPLICIT = torch.rand(3, 3, 128, 128, generator=torch.Generator().manual_seed(0)) < 0.995
TREE = tree_times([-1, *range(64), *range(63)])
# Tight on 128 x 128 positions in tiles of 16 x 16: no tile is called PARTIAL without need.
TIGHT = {
    "causal": tw.causal,
    "window": tw.window(20),
    "window_two_sided": tw.window(40, 9),
    "not_causal": ~tw.causal,
    "chunked": tw.chunked(32),
    "chunked_causal": tw.chunked(48) & tw.causal,
    "prefix": tw.prefix(PREFIXES),
    "prefix_lm": tw.causal | tw.prefix(PREFIXES),
    "lengths": tw.lengths(PREFIXES),
    "document": tw.document(SORTED_IDS),
    "document_causal_window": tw.causal & tw.window(30) & tw.document(SORTED_IDS),
    "ascending": tw.document(SORTED_IDS, ascending=True),
    "ascending_causal_window": tw.causal & tw.window(30) & tw.document(SORTED_IDS, ascending=True),
    "not_ascending": ~tw.document(SORTED_IDS, ascending=True),
    "neighborhood_1d": tw.neighborhood((128,), (33,)),
    "neighborhood_2d_rows": tw.neighborhood((8, 16), (3, 15)),
    "sliding_tile": tw.sliding_tile((4, 4, 8), (2, 2, 4), (1, 1, (1, 0)), causal=True),
    "sliding_tile_heads": tw.sliding_tile((2, 8, 8), 4, [(1, 1, 2), (1, 2, 1), (1, 1, 1)]),
    "sliding_tile_text": tw.sliding_tile((6, 16), (2, 8), (2, 1), text=32, text_first=True),
    "blocks": tw.blocks(BLOCKS, 16),
    "explicit": tw.explicit(EXPLICIT),
    "by_head": tw.mask(lambda b, h, i, j: (i - j < (h + 1) * 24) & (j <= i)),
    "by_batch": tw.mask(lambda b, h, i, j: (b == 1) | (j <= i)),
}


@pytest.mark.parametrize("name", TIGHT)
def test_tight_on_the_named_masks(name: str) -> None:
    tiles = TileMap.build(TIGHT[name], seqlen_q=128, seqlen_k=128, batch=3, heads=3, block_m=16, block_n=16)
    truth = brute(TIGHT[name], tiles, 3, 3)
    assert torch.equal(tiles.classes.expand_as(truth), truth)


@pytest.mark.parametrize(
    ("seqlen_q", "block_m", "block_n"), [(128, 32, 16), (128, 16, 64), (64, 16, 16), (96, 32, 32), (100, 32, 16)]
)
@pytest.mark.parametrize("name", ["causal", "window", "window_two_sided", "prefix_lm", "lengths", "by_head"])
def test_tight_whatever_the_tile(name: str, seqlen_q: int, block_m: int, block_n: int) -> None:
    """Masks of comparisons alone are tight at any size; those that read tensors along i or j need aligned tiles."""
    size = {"seqlen_q": seqlen_q, "seqlen_k": 128, "block_m": block_m, "block_n": block_n}
    tiles = TileMap.build(TIGHT[name], batch=3, heads=3, **size)
    truth = brute(TIGHT[name], tiles, 3, 3)
    assert torch.equal(tiles.classes.expand_as(truth), truth)


def test_dimensions_that_the_mask_does_not_use_stay_1() -> None:
    size = {"seqlen_q": 40, "seqlen_k": 40, "batch": 5, "heads": 4, "block_m": 16, "block_n": 8}
    assert TileMap.build(tw.causal, **size).classes.shape == (1, 1, 3, 5)
    assert TileMap.build(tw.lengths(torch.arange(5)), **size).classes.shape == (5, 1, 3, 5)
    assert TileMap.build(lambda b, h, i, j: (j <= i) | (h == 0), **size).classes.shape == (1, 4, 3, 5)
    assert bool((TileMap.build(None, **size).classes == FULL).all())


def test_no_tile_without_rows_or_keys() -> None:
    assert TileMap.build(tw.causal, seqlen_q=0, seqlen_k=40).classes.shape == (1, 1, 0, 1)
    assert TileMap.build(tw.causal, seqlen_q=40, seqlen_k=0).classes.shape == (1, 1, 1, 0)
    assert TileMap.build(tw.causal, seqlen_q=0, seqlen_k=0).density() == 0.0


@pytest.mark.parametrize("name", ["block_m", "block_n", "batch", "heads"])
def test_sizes_are_positive(name: str) -> None:
    with pytest.raises(InputError, match=f"TileMap {name}: got 0"):
        TileMap.build(tw.causal, seqlen_q=4, seqlen_k=4, **{name: 0})


@pytest.mark.parametrize("name", ["seqlen_q", "seqlen_k"])
def test_lengths_are_not_negative(name: str) -> None:
    with pytest.raises(InputError, match=f"TileMap {name}: got -1; expected an integer from 0"):
        TileMap.build(tw.causal, **({"seqlen_q": 4, "seqlen_k": 4} | {name: -1}))


@pytest.mark.parametrize("name", ["seqlen_q", "seqlen_k", "batch", "heads", "block_m", "block_n"])
@pytest.mark.parametrize("size", [True, 2**63, 2**70, 1.5, None])
def test_sizes_are_integers_of_positions(name: str, size: Any) -> None:
    for mask in (None, tw.causal, tw.document(torch.zeros(4, dtype=torch.int64))):
        with pytest.raises(InputError, match=f"TileMap {name}: got"):
            TileMap.build(mask, **({"seqlen_q": 4, "seqlen_k": 4} | {name: size}))


@pytest.mark.parametrize("device", ["nowhere", 2.5, "meta"])
def test_devices(device: Any) -> None:
    with pytest.raises(InputError, match=r"TileMap device|captured tensor 0: got cpu"):
        TileMap.build(tw.document(torch.zeros(4, dtype=torch.int64)), seqlen_q=4, seqlen_k=4, device=device)


@pytest.mark.parametrize(
    ("mask", "size"),
    [
        (tw.neighborhood((2, 2), 1), {"seqlen_q": 9, "seqlen_k": 9}),
        (tw.explicit(torch.ones(3, 1, 4, 4, dtype=torch.bool)), {"batch": 2}),
        (tw.explicit(torch.ones(1, 3, 4, 4, dtype=torch.bool)), {"heads": 2}),
        (tw.document(torch.zeros(6, dtype=torch.int64)), {}),
        (tw.lengths(torch.ones(2, dtype=torch.int64)), {"batch": 1}),
    ],
)
def test_masks_are_for_these_sizes(mask: Any, size: dict[str, int]) -> None:
    """As `attention` takes them: an index that stays inside is not enough."""
    with pytest.raises(InputError, match="as the call has it"):
        TileMap.build(mask, **({"seqlen_q": 4, "seqlen_k": 4} | size))


def test_captured_tensors_are_large_enough() -> None:
    with pytest.raises(FormulaError, match=r"mask: index 0 into captured tensor 0 of shape .*reaches 0 to 8"):
        TileMap.build(tw.document(torch.zeros(8, dtype=torch.int64)), seqlen_q=9, seqlen_k=9)
    with pytest.raises(FormulaError, match="mask: index 0"):
        flex.create_block_mask(tw.lengths(torch.tensor([3])), 2, None, 9, 9).to_tile_map()


@given(tree=bool_trees(max_leaves=3), size=sizes())
def test_lists_and_transpose_say_the_same(tree: Any, size: dict[str, int]) -> None:
    tiles = TileMap.build(as_mask_function(tree, captured_tensors()), batch=2, heads=3, **size)
    for view in (tiles, tiles.transposed()):
        rebuilt = torch.zeros_like(view.classes)
        for kind in (PARTIAL, FULL):
            count, index = view.lists(kind)
            assert count.dtype == index.dtype == torch.int32
            listed = torch.arange(index.shape[-1]) < count[..., None]
            rebuilt.scatter_add_(-1, index.long(), listed.to(torch.int8) * kind)
            ordered = torch.where(listed, index, index.shape[-1])
            assert bool((ordered.diff(dim=-1)[listed[..., 1:]] > 0).all()), "listed tiles are in rising order"
        assert torch.equal(rebuilt, view.classes)
    back = tiles.transposed()
    assert (back.seqlen_q, back.block_m) == (tiles.seqlen_k, tiles.block_n)
    assert torch.equal(back.classes.transpose(-1, -2), tiles.classes)


def test_density() -> None:
    assert TileMap.build(tw.causal, seqlen_q=64, seqlen_k=64, block_m=16, block_n=16).density() == 10 / 16


# FlexAttention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "window", "prefix_lm", "document", "chunked", "by_head"])
def test_create_block_mask_gives_the_same_tiles(name: str) -> None:
    mask = TIGHT[name]

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return mask.evaluate(b=b, h=h, i=q, j=k)

    theirs = create_block_mask(mask_mod, 3, 3, 128, 128, device="cpu", BLOCK_SIZE=16)
    ours = TileMap.build(mask, seqlen_q=128, seqlen_k=128, batch=3, heads=3, block_m=16, block_n=16)
    imported = TileMap.from_block_mask(theirs)
    assert torch.equal(imported.classes, ours.classes.expand_as(imported.classes))
    assert (imported.seqlen_q, imported.seqlen_k, imported.block_m, imported.block_n) == (128, 128, 16, 16)


@pytest.mark.parametrize("size", [(128, 128, 16, 16), (100, 120, 32, 16), (40, 130, 64, 128)], ids=str)
def test_export_and_import_give_the_tiles_back(size: tuple[int, int, int, int]) -> None:
    seqlen_q, seqlen_k, block_m, block_n = size
    tiles = TileMap.build(
        tw.causal & tw.window(30), seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_m=block_m, block_n=block_n
    )
    exported = tiles.to_block_mask(lambda b, h, q, k: q >= k)
    again = TileMap.from_block_mask(exported)
    assert torch.equal(again.classes, tiles.classes)
    assert (again.seqlen_q, again.seqlen_k, again.block_m, again.block_n) == size


# cost --------------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, resource, time
import torch, tilewise as tw
from tilewise.schedule.tilemap import TileMap
torch.set_num_threads(1)
n = 131072
ids = torch.arange(n) // 5000
mask = tw.causal & tw.window(4096) & tw.document(ids)
TileMap.build(tw.causal & tw.window(4096) & tw.document(ids[:1024]), seqlen_q=1024, seqlen_k=1024)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seconds = []
for _ in range(3):
    start = time.process_time()
    tiles = TileMap.build(mask, seqlen_q=n, seqlen_k=n)
    seconds.append(time.process_time() - start)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"seconds": min(seconds), "mib": grown / 1024, "visited": int((tiles.classes > 0).sum())}))
"""


def test_128k_by_128k_costs_little_time_and_memory() -> None:
    """128 x 128 tiles in under 0.5 s and 64 MiB.

    The time is processor time of one thread, which other load hardly moves, and has slack of three all the same; the
    memory is what the peak of a fresh process grows by. `python -m benchmarks tile_classes` keeps the record.
    """
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert found["seconds"] < 3 * 0.5
    assert found["mib"] < 64
    assert 1024 < found["visited"] < 1024 * 34


def test_a_broken_classification_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block tables that forget their last element call tiles FULL or EMPTY that are not, and the checker sees it."""
    honest = rule._extrema

    def forgetful(tensor: torch.Tensor, spec: Any) -> Any:
        return honest(torch.cat([tensor[..., 1:], tensor[..., -1:]], -1), spec)

    monkeypatch.setattr(rule, "_extrema", forgetful)
    mask = tw.document((torch.arange(128) + 15) // 32)  # a document begins at the second row of a tile
    tiles = TileMap.build(mask, seqlen_q=128, seqlen_k=128, block_m=16, block_n=16)
    with pytest.raises(AssertionError, match="FULL or EMPTY"):
        check_sound(mask, tiles, 1, 1)
