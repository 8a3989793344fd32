"""Arguments of wrong types and sizes end in errors of the library: no traceback from inside, nothing accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.adapters import flash_attn, flashinfer, flex, sdpa
from tilewise.adapters.transformers import attention_forward
from tilewise.cli.expression import MAX_LIST, read_mask
from tilewise.core.errors import FormulaError, InputError, TilewiseError
from tilewise.kv import KVCache, PageAllocator, PagePool

X = torch.ones(1, 4, 2, 8)
LOGITS, TARGET = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)
BEYOND = 10**400  # no float holds it
LARGE = 10**29  # no integer of 64 bits
CALLS: dict[str, Callable[[Any], Any]] = {
    "scale": lambda x: tw.attention(X, X, X, scale=x),
    "scale of why": lambda x: tw.why(X, X, X, scale=x),
    "scale of plan": lambda x: tw.plan(X, X, X, scale=x),
    "scale of select_tiles": lambda x: tw.select_tiles(X, X, tw.TopK(0.5), scale=x),
    "dropout": lambda x: tw.attention(X, X, X, dropout=x),
    "softcap": tw.softcap,
    "max_distance": lambda x: tw.relative_bias(torch.ones(32, 2), max_distance=x),
    "temperature": lambda x: tw.softmax(X, -1, temperature=x),
    "ignore_index": lambda x: tw.cross_entropy(LOGITS, TARGET, ignore_index=x),
    "z_loss": lambda x: tw.cross_entropy(LOGITS, TARGET, z_loss=x),
    "label_smoothing": lambda x: tw.cross_entropy(LOGITS, TARGET, label_smoothing=x),
    "softcap of a loss": lambda x: tw.linear_cross_entropy(LOGITS, torch.ones(5, 4), TARGET, softcap=x),
    "eps": lambda x: tw.rms_norm(X, torch.ones(8), eps=x),
    "eps of layer_norm": lambda x: tw.layer_norm(X, torch.ones(8), torch.ones(8), eps=x),
    "offset": lambda x: tw.rms_norm(X, torch.ones(8), offset=x),
    "base": lambda x: tw.rope_tables(4, 8, base=x),
    "factor": tw.LinearScaling,
    "text": lambda x: tw.TokenOrder((4,), 1, text=x),
    "lam": lambda x: tw.Sparge(0.5, 0.5, x),
    "softmax_scale": lambda x: flash_attn.flash_attn_func(X, X, X, softmax_scale=x),
    "softcap of flash_attn": lambda x: flash_attn.flash_attn_func(X, X, X, softcap=x),
    "softmax_scale of a cache": lambda x: flash_attn.flash_attn_with_kvcache(X, X, X, softmax_scale=x),
    "cache_seqlens": lambda x: flash_attn.flash_attn_with_kvcache(X, X, X, cache_seqlens=x),
    "sm_scale": lambda x: flashinfer.single_prefill_with_kv_cache(X[0], X[0], X[0], sm_scale=x),
    "logits_soft_cap": lambda x: flashinfer.single_prefill_with_kv_cache(X[0], X[0], X[0], logits_soft_cap=x),
    "scale of sdpa": lambda x: sdpa.scaled_dot_product_attention(X, X, X, scale=x),
    "scale of flex": lambda x: flex.flex_attention(X, X, X, scale=x),
    "scaling": lambda x: attention_forward(torch.nn.Module(), X, X, X, scaling=x),
    "softcap of transformers": lambda x: attention_forward(torch.nn.Module(), X, X, X, softcap=x),
}
INTEGERS = ("ignore_index", "max_distance", "text", "cache_seqlens", "base")


@pytest.mark.parametrize("name", CALLS)
def test_numbers_that_nothing_holds(name: str) -> None:
    with pytest.raises(TilewiseError, match=f"{BEYOND.bit_length()} bits"):
        CALLS[name](BEYOND)
    if name in INTEGERS and name != "base":
        with pytest.raises(TilewiseError):
            CALLS[name](LARGE)
    elif name not in ("dropout", "label_smoothing"):
        CALLS[name](LARGE)


def test_an_argument_that_attention_has_not() -> None:
    with pytest.raises(
        InputError, match=r"^foo: got 1, an argument that tilewise.why does not take; expected one of q, k, v, mask"
    ):
        tw.why(X, X, X, foo=1)


STRANGE: list[Any] = [1.5, True, "ab", None, torch.tensor(2), torch.tensor([1, 2]), [1.5], [None], [[1]], {1: 2}, -1]
OF_ALLOCATOR: dict[str, Callable[[PageAllocator, Any, Any], Any]] = {
    "num_pages": lambda a, s, x: PageAllocator(x, 4),
    "page_size": lambda a, s, x: PageAllocator(4, x),
    "truncate": lambda a, s, x: a.truncate(s, x),
    "append": lambda a, s, x: a.append(s, x),
    "needed": lambda a, s, x: a.needed(s, x),
    "fork": lambda a, s, x: a.fork(s, x),
    "holders": lambda a, s, x: a.holders(x),
    "keep": lambda a, s, x: a.keep(x),
    "create": lambda a, s, x: a.create(x),
    "create of one": lambda a, s, x: a.create([x]),
    "merge": lambda a, s, x: a.merge(s, x, 0),
    "append_all": lambda a, s, x: a.append_all(x),
    "append_all of one": lambda a, s, x: a.append_all([x]),
    "append_all of counts": lambda a, s, x: a.append_all([(s, x)]),
    "append_all of sequences": lambda a, s, x: a.append_all([(x, 1)]),
    "free": lambda a, s, x: a.free(x),
    "slot": lambda a, s, x: s.slot(x),
}


@pytest.mark.parametrize("name", OF_ALLOCATOR)
@pytest.mark.parametrize("value", STRANGE, ids=str)
def test_what_an_allocator_is_given(name: str, value: Any) -> None:
    allocator = PageAllocator(8, 4)
    sequence = allocator.create()
    allocator.append(sequence, 5)
    with pytest.raises(InputError) as caught:
        OF_ALLOCATOR[name](allocator, sequence, value)
    assert len(str(caught.value)) < 4000
    assert (sequence.length, len(sequence.pages), allocator.num_free, allocator.violations()) == (5, 2, 6, [])


OF_CACHE: dict[str, Callable[[KVCache, Any, Any], Any]] = {
    "new": lambda c, s, x: c.new(x),
    "remember": lambda c, s, x: c.remember(s, x),
    "counts": lambda c, s, x: c.extend([s], x),
    "a count": lambda c, s, x: c.extend([s], [x]),
    "sequences": lambda c, s, x: c.extend(x, 1),
    "a sequence": lambda c, s, x: c.extend([x], 1),
    "fork": lambda c, s, x: c.fork(s, x),
    "fork of": lambda c, s, x: c.fork(x),
    "truncate": lambda c, s, x: c.truncate(s, x),
    "truncate of": lambda c, s, x: c.truncate(x, 1),
    "free": lambda c, s, x: c.free(x),
    "pages": lambda c, s, x: c.pages(x),
    "summaries": lambda c, s, x: c.pool.summaries(x),
    "copy": lambda c, s, x: c.pool.copy(x),
    "open": lambda c, s, x: c.pool.open(x, x),
    "layers": lambda c, s, x: PagePool(x, 8, 4, 2, 8),
}
TOKENS = ([1.5], [None], [[1]])  # tokens may be whatever can be compared and hashed; less than a page is not looked at


@pytest.mark.parametrize("name", OF_CACHE)
@pytest.mark.parametrize("value", STRANGE, ids=str)
def test_what_a_cache_is_given(name: str, value: Any) -> None:
    if name in ("new", "remember") and value in TOKENS:
        return
    cache = KVCache(1, 8, 4, 2, 8)
    sequence = cache.new()
    cache.extend([sequence], 5)
    with pytest.raises(InputError):
        OF_CACHE[name](cache, sequence, value)
    assert (sequence.length, cache.allocator.num_free, cache.allocator.violations()) == (5, 6, [])


def test_tokens_without_a_hash() -> None:
    cache = KVCache(1, 8, 4, 2, 8)
    with pytest.raises(InputError, match=r"^tokens: got "):
        cache.new([[1]] * 5)  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"^extra: got list"):
        cache.new([1] * 5, extra=[1])


SELECT = {"name": "a", "select": {"tau": 0.9, "theta": 0.5, "lam": None, "block": [128, 128], "far": "drop"}}
WINDOWS = {"windows": [[1, 1, 1]], "extents": [2, 2, 2], "tile": 1, "order": "tile", "text": 0, "text_first": False}


def _select(**changes: Any) -> list[Any]:
    return [{**SELECT, "select": {**SELECT["select"], **changes}}]  # type: ignore[dict-item]


def _windows(**changes: Any) -> list[Any]:
    return [{"name": "b", "mask": {**WINDOWS, **changes}}]


LAYERS: list[Any] = [
    None, 5, "x", [1], [[]], [{}], [{"name": 1}], [{"name": "a"}], [{"name": "a", "select": 1}],
    [{"name": "a", "select": {}}], [{"name": "a", "mask": {}}], [{"name": "a", "mask": None}], [SELECT, SELECT],
    {"a": SELECT}, _select(tau="x"), _select(block=None), _select(tau=[[1]]), _select(far=[]), _select(lam=BEYOND),
    _windows(windows=5), _windows(windows=[5]), _windows(windows="abc"), _windows(windows=[]), _windows(tile=None),
    _windows(text_first="no"), _windows(windows=[["a", 1, 1]]), _windows(order=5), _windows(text=1.5),
]  # fmt: skip
FILES = [
    b"",
    b"\xff\xfe",
    b"[]",
    b"{}",
    b"null",
    b"[" * 10**5,
    json.dumps({"format": "tilewise selections 1"}).encode(),
]


def test_files_of_selections(tmp_path: Path) -> None:
    file = tmp_path / "selections.json"
    written = [json.dumps({"format": "tilewise selections 1", "layers": x}).encode() for x in LAYERS]
    for text in FILES + written:
        file.write_bytes(text)
        with pytest.raises(InputError, match=r"selections\.json") as caught:
            tw.load_selections(file)
        assert len(str(caught.value)) < 4000
    file.write_text(json.dumps({"format": "tilewise selections 1", "layers": [SELECT, *_windows()]}))
    assert list(tw.load_selections(file)) == ["a", "b"]
    with pytest.raises(InputError, match=r"^device: got 'nowhere'"):
        tw.load_selections(file, device="nowhere")
    for path in (None, 5, tmp_path, ["a"]):
        with pytest.raises(InputError):
            tw.load_selections(path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "document([[0] * 10**6] * 10**6)",
        "document([[0] * 1000000] * 1000000)",
        "document([[[0] * 1000] * 1000] * 1000)",
        "document([[]] * 100000000000000)",
        "document([[0] * 1000000, [0] * 1000000])",
        "document([[0] * 600000] + [[0] * 600000])",
    ],
)
def test_lists_of_lists_on_the_command_line(text: str) -> None:
    with pytest.raises(FormulaError) as caught:
        read_mask(text)
    assert len(str(caught.value)) < 4000


def test_lists_that_fit() -> None:
    assert read_mask(f"document([0] * {MAX_LIST // 2} + [1] * {MAX_LIST // 2})") is not None
    made = read_mask("document([[0] * 3 + [1]] * 2)")
    assert made is not None
    assert made.tensors[0].tolist() == [[0, 0, 0, 1]] * 2
