"""FlashAttention's functions over a cache against attention written out in float64, request by request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.adapters.dense import assert_close, dense
from tests.adapters.test_flash_attn import scores, visible
from tilewise.adapters import flash_attn, flash_attn_interface

HEADS, DIM, DIM_V = 2, 16, 8
LENGTHS = [5, 0, 21, 13]
NEW, QUERIES, CAPACITY = 3, 4, 32


def angles(half: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(64, dtype=torch.float64)[:, None] * torch.linspace(1.0, 0.05, half, dtype=torch.float64)
    return at.cos().to(dtype), at.sin().to(dtype)


def make(
    page_size: int = 0,
    *,
    heads: int = 4,
    lengths: list[int] = LENGTHS,
    new: int = NEW,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Arguments of a call; what is not written or not visible in the caches is NaN. `page_size` 0 is contiguous."""
    generator = torch.Generator().manual_seed(len(lengths) + page_size)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch = len(lengths)
    arguments: dict[str, Any] = {"q": random(batch, QUERIES, heads, DIM)}
    arguments["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
    size, each = page_size or CAPACITY, -(-CAPACITY // (page_size or CAPACITY))
    pages = batch * each + 2
    table = torch.randperm(pages, generator=generator)[: batch * each].view(batch, each).to(torch.int32)
    arguments["block_table" if page_size else "cache_batch_idx"] = table if page_size else table[:, 0].contiguous()
    for name, dim in (("k", DIM), ("v", DIM_V)):
        if new:
            arguments[name] = random(batch, new, HEADS, dim)
        cache = torch.full((pages, size, HEADS, dim), torch.nan, dtype=dtype)
        for r, n in enumerate(lengths):
            for t in range(n):
                cache[table[r, t // size], t % size] = random(HEADS, dim)
        arguments[f"{name}_cache"] = cache
    return arguments


def rotate(x: torch.Tensor, at: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x (rows, heads, dim) turned pair by pair, as complex numbers."""
    half, turned = cos.shape[1], x.clone()
    for p in range(half):
        first, second = (2 * p, 2 * p + 1) if interleaved else (p, p + half)
        c, s = (table[at, p].to(x.dtype)[:, None] for table in (cos, sin))
        turned[..., first] = x[..., first] * c - x[..., second] * s
        turned[..., second] = x[..., second] * c + x[..., first] * s
    return turned


def place(arguments: dict[str, Any], r: int, t: int) -> tuple[int, int]:
    """Page, or row, and offset of token t of request r."""
    table, index = arguments.get("block_table", arguments.get("page_table")), arguments.get("cache_batch_idx")
    if table is None:
        return r if index is None else int(index[r]), t
    size = arguments["k_cache"].shape[1]
    return int(table[r, t // size]), t % size


def rows_of(arguments: dict[str, Any], name: str, r: int, count: int) -> torch.Tensor:
    """Copies of tokens 0 to count of request r."""
    cache = arguments[f"{name}_cache"]
    tokens = [cache[place(arguments, r, t)] for t in range(count)]
    return torch.stack(tokens) if tokens else cache[0, :0]


def want(arguments: dict[str, Any], dtype: torch.dtype, empty: float = torch.inf) -> list[Any]:
    """[o, lse] in `dtype` from the caches before the call, and the caches' new rows, by request."""
    q = arguments["q"]
    cu, cu_new = arguments.get("cu_seqlens_q"), arguments.get("cu_seqlens_k_new")
    lengths = arguments["cache_seqlens"]
    batch = len(cu) - 1 if cu is not None else len(q)
    lengths = [lengths] * batch if isinstance(lengths, int) else lengths.tolist()
    causal, window = arguments.get("causal", False), arguments.get("window_size", (-1, -1))
    found: list[Any] = [[], [], []]
    for r, length in enumerate(lengths):
        queries = q[r] if cu is None else q[cu[r] : cu[r + 1]]
        queries, written = queries.to(dtype), []
        keys, values = (rows_of(arguments, name, r, length).to(dtype) for name in "kv")
        if "k" in arguments:
            k, v = (arguments[name] for name in "kv")
            k, v = (x[r] if cu_new is None else x[cu_new[r] : cu_new[r + 1]] for x in (k, v))
            k, v = k.to(dtype), v.to(dtype)
            if "rotary_cos" in arguments:
                start = length if "rotary_seqlens" not in arguments else int(arguments["rotary_seqlens"][r])
                options = (arguments["rotary_cos"], arguments["rotary_sin"], arguments.get("rotary_interleaved", True))
                k = rotate(k, torch.arange(len(k)) + start, *options)
                step = torch.arange(len(queries)) * (causal or tuple(window) != (-1, -1))
                queries = rotate(queries, start + step, *options)
            written = [k, v]
            keys, values = torch.cat((keys, k)), torch.cat((values, v))
        pad = int(arguments["cache_leftpad"][r]) if "cache_leftpad" in arguments else 0
        keys, values = keys[pad:], values[pad:]
        slopes = arguments.get("alibi_slopes")
        slopes = slopes if slopes is None or slopes.ndim == 1 else slopes[r : r + 1]
        shape = (len(queries), len(keys))
        change = scores(arguments.get("softcap", 0.0), slopes, *shape)
        scale = arguments.get("softmax_scale", DIM**-0.5)
        o, lse, _ = dense(
            *(x.transpose(0, 1)[None] for x in (queries, keys, values)),
            visible(*shape, causal, window),
            change,
            scale=scale,
        )
        found[0].append(o[0].transpose(0, 1))
        found[1].append(lse[0].masked_fill(lse[0] == -torch.inf, empty))
        found[2].append(written)
    join = torch.stack if cu is None else torch.cat
    return [join(found[0]), torch.stack(found[1]) if cu is None else torch.cat(found[1], -1), found[2]]


def agree(arguments: dict[str, Any], version: int = 2) -> Any:
    """One call: its results, the new rows of the caches, and that nothing else in them has changed."""
    module = flash_attn if version == 2 else flash_attn_interface
    empty = torch.inf if version == 2 else -torch.inf
    dtype = arguments["q"].dtype
    exact, plain = want(arguments, torch.float64, empty), want(arguments, dtype, empty)
    before = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    function: Any = module.flash_attn_with_kvcache
    o, lse = function(**arguments, return_softmax_lse=True)
    for what, x, reference, other in zip(("o", "lse"), (o, lse), exact, plain, strict=False):
        assert_close(x, reference, other, what, 1.0)
    lengths = arguments["cache_seqlens"]
    lengths = [lengths] * len(exact[2]) if isinstance(lengths, int) else lengths.tolist()
    for r, (rows, other) in enumerate(zip(exact[2], plain[2], strict=True)):
        for name, row, like in zip("kv", rows, other, strict=False):
            cache, earlier = arguments[f"{name}_cache"], before[f"{name}_cache"]
            got = rows_of(arguments, name, r, lengths[r] + len(row))[lengths[r] :]
            assert_close(got, row, like, f"new {name} of request {r}")
            if name == "v" or "rotary_cos" not in arguments:
                assert torch.equal(got.double(), row.double())
            for t in range(lengths[r], lengths[r] + len(row)):
                at = place(arguments, r, t)
                earlier[at] = cache[at]
    for name, cache in before.items():
        torch.testing.assert_close(arguments[name], cache, rtol=0, atol=0, equal_nan=True)
    return o, lse


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (6, 1)},
    "left of the query": {"window_size": (3, -1), "causal": True},
    "right of the query": {"window_size": (-1, 2)},
    "softcap": {"softcap": 1.5, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.02])},
    "alibi of each request": {"alibi_slopes": torch.linspace(0.01, 0.6, 16).view(4, 4), "causal": True, "softcap": 2.0},
    "scale": {"softmax_scale": 0.7, "num_splits": 3},
}
ROTARY: dict[str, dict[str, Any]] = {
    "not rotated": {},
    "neighbours": dict(zip(("rotary_cos", "rotary_sin"), angles(8), strict=True)),
    "halves": {**dict(zip(("rotary_cos", "rotary_sin"), angles(8), strict=True)), "rotary_interleaved": False},
    "some dimensions": dict(zip(("rotary_cos", "rotary_sin"), angles(3), strict=True)),
    "halves of some": {**dict(zip(("rotary_cos", "rotary_sin"), angles(5), strict=True)), "rotary_interleaved": False},
}


@pytest.mark.parametrize("page_size", [0, 16, 256, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_reading(name: str, page_size: int) -> None:
    agree({**make(page_size, new=0), **VARIANTS[name]})


@pytest.mark.parametrize("page_size", [0, 16, 256, 3])
@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("name", ["plain", "causal", "window", "right of the query"])
def test_appending(name: str, rotary: str, page_size: int) -> None:
    agree({**make(page_size), **VARIANTS[name], **ROTARY[rotary]})


@pytest.mark.parametrize("page_size", [0, 3])
@pytest.mark.parametrize("new", [0, 1, 6])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "alibi"])
def test_left_padding(name: str, new: int, page_size: int) -> None:
    """What lies before it is NaN in one request and not in others; rotation counts it, as the package does."""
    arguments = {**make(page_size, new=new), **VARIANTS[name]}
    arguments |= {**ROTARY["halves"]} if new else {}
    pads = [2, 0, 17, 13]
    arguments["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)
    for cache in ("k_cache", "v_cache"):
        for t in range(17):
            arguments[cache][place(arguments, 2, t)] = torch.nan
    agree(arguments)


@pytest.mark.parametrize("heads", [2, 8])
def test_heads(heads: int) -> None:
    agree({**make(0, heads=heads), "causal": True})
    arguments = make(16, heads=heads)
    one = {name: arguments[name][..., :1, :].clone() for name in ("k", "v", "k_cache", "v_cache")}
    agree({**arguments, **one, "causal": True})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    for page_size in (0, 16):
        agree({**make(page_size, dtype=dtype), **ROTARY["not rotated"], "causal": True})
    got = {
        **make(16, dtype=dtype),
        "causal": True,
        **dict(zip(("rotary_cos", "rotary_sin"), angles(8, dtype), strict=True)),
    }
    if dtype == torch.float64:
        agree(got)
    else:  # rounded once more than in `want`: what is rotated is written, and read, in 16 bits
        exact = want(got, torch.float64)
        o = flash_attn.flash_attn_with_kvcache(**got)
        torch.testing.assert_close(o.double(), exact[0], rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("version", [2, 3])
def test_lengths(version: int) -> None:
    """One number for all, rows in order, nothing at all, everything there is."""
    arguments = make(0, lengths=[7, 7, 7])
    arguments["cache_seqlens"] = 7
    agree({**arguments, "causal": True}, version)
    ordered = make(0, lengths=[7, 7, 7])
    index = ordered.pop("cache_batch_idx")
    for name in ("k_cache", "v_cache"):
        ordered[name] = ordered[name][index.long()]
    agree({**ordered, "causal": True}, version)

    empty = make(16 if version == 2 else 0, lengths=[0, 0], new=0)
    o, lse = agree(empty, version)
    assert bool((o == 0).all())
    assert bool((lse == (torch.inf if version == 2 else -torch.inf)).all())
    full = make(0, lengths=[CAPACITY, CAPACITY], new=0)
    expected = want({**full, "cache_seqlens": CAPACITY}, torch.float64)
    del full["cache_seqlens"]
    function: Any = (flash_attn if version == 2 else flash_attn_interface).flash_attn_with_kvcache
    torch.testing.assert_close(function(**full).double(), expected[0], rtol=0, atol=1e-5)
    none = make(0)
    none["k"], none["v"] = none["k"][:, :0], none["v"][:, :0]
    agree(none, version)


def third(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call in the words of FlashAttention-3."""
    table = arguments.pop("block_table", None)
    return arguments if table is None else {**arguments, "page_table": table}


@pytest.mark.parametrize("page_size", [0, 3])
@pytest.mark.parametrize("new", [[3, 0, 1, 5], []])
def test_packed_queries_and_new_keys(new: list[int], page_size: int) -> None:
    arguments = {**third(make(page_size, new=0)), "causal": True}
    counts = [2, 1, 0, 6]
    arguments["q"] = torch.randn(sum(counts), 4, DIM, generator=torch.Generator().manual_seed(3))
    arguments["cu_seqlens_q"] = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    arguments["max_seqlen_q"] = 6
    if new:
        arguments["k"] = torch.randn(sum(new), HEADS, DIM)
        arguments["v"] = torch.randn(sum(new), HEADS, DIM_V)
        arguments["cu_seqlens_k_new"] = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
        arguments |= ROTARY["some dimensions"]
        agree({**arguments, "rotary_seqlens": torch.tensor([9, 1, 0, 40], dtype=torch.int32)}, 3)
    else:
        agree(arguments, 3)


def test_descale() -> None:
    """Factors of q, k and v, by request and head of the cache; q's and k's come before softcap."""
    arguments = {**third(make(16, new=0)), "softcap": 2.0, "causal": True}
    factors = [torch.linspace(low, 2.0, 8).view(4, 2) for low in (0.5, 0.2, 0.1)]
    names = ("q_descale", "k_descale", "v_descale")
    got = flash_attn_interface.flash_attn_with_kvcache(
        **arguments, **dict(zip(names, factors, strict=True)), return_softmax_lse=True
    )
    assert isinstance(got, tuple)
    exact = {**arguments}
    exact["q"] = arguments["q"].double() * factors[0].repeat_interleave(2, 1)[:, None, :, None]
    exact["k_cache"], exact["v_cache"] = (arguments[name].double() for name in ("k_cache", "v_cache"))
    for r in range(4):
        for name, factor in (("k_cache", factors[1]), ("v_cache", factors[2])):
            pages = arguments["page_table"][r].long()
            exact[name][pages] = exact[name][pages] * factor[r][:, None]
    o, lse, _ = want(exact, torch.float64, -torch.inf)
    torch.testing.assert_close(got[0].double(), o, rtol=0, atol=1e-5)
    torch.testing.assert_close(got[1].double(), lse, rtol=0, atol=1e-5)
    packed = {**arguments, "q": arguments["q"].flatten(0, 1)}
    packed["cu_seqlens_q"] = torch.arange(5, dtype=torch.int32) * QUERIES
    again = flash_attn_interface.flash_attn_with_kvcache(**packed, **dict(zip(names, factors, strict=True)))
    assert isinstance(again, torch.Tensor)
    torch.testing.assert_close(again.view_as(got[0]), got[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("page_size", [0, 5])
def test_a_prompt_and_then_token_by_token_is_one_causal_attention(page_size: int, version: int) -> None:
    """The caller's loop: append the prompt, then a token at a time, the lengths kept by the caller."""
    total, prompt, batch = 23, 9, 2
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, total, h, DIM, generator=generator) for h in (4, HEADS, HEADS))
    rotated = [rotate(x.flatten(0, 1), torch.arange(total).repeat(batch), *angles(8), False) for x in (q, k)]
    whole = flash_attn.flash_attn_func(
        rotated[0].view_as(q), rotated[1].view_as(k), v, causal=True, window_size=(14, 0)
    )
    shape = (batch, 24) if not page_size else (2 * batch * 5, page_size)
    caches = [torch.full((*shape, HEADS, DIM), torch.nan) for _ in range(2)]
    options: dict[str, Any] = {"causal": True, "window_size": (14, 0), **ROTARY["halves"]}
    if page_size:
        name = "block_table" if version == 2 else "page_table"
        options[name] = torch.randperm(20, generator=generator)[:10].view(batch, 5).to(torch.int32)
    lengths, parts, first = torch.zeros(batch, dtype=torch.int32), [], 0
    function: Any = (flash_attn if version == 2 else flash_attn_interface).flash_attn_with_kvcache
    for count in [prompt, *[1] * (total - prompt)]:
        now = slice(first, first + count)
        parts.append(function(q[:, now], *caches, k[:, now], v[:, now], cache_seqlens=lengths, **options))
        lengths += count
        first += count
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)


def test_caches_of_any_strides_are_changed_in_place() -> None:
    """Keys and values in one tensor, heads before tokens; left padding, too."""
    plain = {**make(4), "cache_leftpad": torch.tensor([1, 0, 20, 3], dtype=torch.int32), "causal": True}
    both = torch.full((len(plain["k_cache"]), 2, HEADS, 4, DIM), torch.nan)
    k_cache, v_cache = (x.transpose(1, 2) for x in both.unbind(1))
    v_cache = v_cache[..., :DIM_V]
    k_cache.copy_(plain["k_cache"])
    v_cache.copy_(plain["v_cache"])
    agree({**plain, "k_cache": k_cache, "v_cache": v_cache})
    columns = {name: plain[name].transpose(-1, -2).contiguous().transpose(-1, -2) for name in ("q", "k", "v")}
    agree({**make(4), **columns})


def test_compiles_and_takes_no_gradient() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, lengths: Any, table: Any, cos: Any, sin: Any) -> Any:
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, cache_seqlens=lengths, block_table=table, causal=True
        )

    theirs, ours = make(4), make(4)
    want_o = flash_attn.flash_attn_with_kvcache(**theirs, **ROTARY["neighbours"], causal=True)
    q, k, v = (ours[name].requires_grad_() for name in ("q", "k", "v"))
    caches = (ours["k_cache"], ours["v_cache"])
    o = step(q, *caches, k, v, ours["cache_seqlens"], ours["block_table"], *angles(8))
    assert not o.requires_grad
    torch.testing.assert_close(o, want_o)
    torch.testing.assert_close(caches, (theirs["k_cache"], theirs["v_cache"]), equal_nan=True)
