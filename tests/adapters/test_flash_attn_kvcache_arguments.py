"""FlashAttention's functions over a cache: signatures, what is refused before anything is written, and pages in
`flash_attn_varlen_func`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.adapters.dense import leaves
from tests.adapters.test_flash_attn_kvcache import DIM, DIM_V, HEADS, angles, make, third
from tilewise.adapters import flash_attn, flash_attn_interface
from tilewise.core.errors import InputError, UnsupportedError

# names, order and defaults of flash_attn 2.8's and flash_attn_interface's functions
NEW = {"q": ..., "k_cache": ..., "v_cache": ..., "k": None, "v": None}
CACHE = {"rotary_cos": None, "rotary_sin": None, "cache_seqlens": None, "cache_batch_idx": None, "cache_leftpad": None}
SCALES = {"rotary_seqlens": None, "q_descale": None, "k_descale": None, "v_descale": None}
PACKED = {"cu_seqlens_q": None, "cu_seqlens_k_new": None}
MASK = {"causal": False, "window_size": (-1, -1)}
TUNED = {"num_splits": 0, "pack_gqa": None, "sm_margin": 0}
SECOND = {
    **NEW, **CACHE, "block_table": None, "softmax_scale": None, **MASK, "softcap": 0.0, "rotary_interleaved": True,
    "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
}  # fmt: skip
THIRD = {
    **NEW, "qv": None, **CACHE, "page_table": None, **PACKED, "max_seqlen_q": None, **SCALES, "softmax_scale": None,
    **MASK, "attention_chunk": 0, "softcap": 0.0, "rotary_interleaved": True, "scheduler_metadata": None, **TUNED,
    "return_softmax_lse": False,
}  # fmt: skip
METADATA = {
    **dict.fromkeys(("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim"), ...),
    "cache_seqlens": ..., "qkv_dtype": torch.bfloat16, "headdim_v": None, **PACKED, "cache_leftpad": None,
    "page_size": None, "max_seqlen_k_new": 0, **MASK, "attention_chunk": 0, "has_softcap": False, **TUNED,
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (flash_attn.flash_attn_with_kvcache, SECOND),
        (flash_attn_interface.flash_attn_with_kvcache, THIRD),
        (flash_attn_interface.get_scheduler_metadata, METADATA),
    ],
)
def test_signatures(function: Callable[..., Any], names: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    found = {x.name: ... if x.default is inspect.Parameter.empty else x.default for x in parameters}
    assert list(found.items()) == list(names.items())


TENSOR = torch.zeros(4, dtype=torch.int32)
COS, SIN = angles(8)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BOTH: list[tuple[str, dict[str, Any]]] = [
    ("q", {"q": None}),
    ("q", {"q": torch.zeros(4, 4, DIM)}),
    ("q", {"q": torch.zeros(4, 2, 4, DIM, dtype=torch.int64)}),
    ("k_cache", {"k_cache": torch.zeros(9, 4, DIM)}),
    ("k_cache", {"k_cache": torch.zeros(34, 4, HEADS, DIM, dtype=torch.float16)}),
    ("k_cache", {"k_cache": torch.zeros(34, 4, DIM, HEADS).transpose(2, 3)}),
    ("k_cache", {"q": torch.zeros(4, 2, 3, DIM)}),
    ("k_cache", {"q": torch.zeros(4, 2, 4, 8)}),
    ("k_cache", {"q": torch.zeros(4, 2, 4, DIM, dtype=torch.float8_e4m3fn).float(),
                 "k_cache": torch.zeros(34, 4, HEADS, DIM, dtype=torch.float8_e4m3fn)}),
    ("k_cache", {name: torch.zeros(34, 0, HEADS, dim) for name, dim in (("k_cache", DIM), ("v_cache", DIM_V))}),
    ("v_cache", {"v_cache": torch.zeros(33, 4, HEADS, DIM_V)}),
    ("v", {"v": None}),
    ("k", {"k": None}),
    ("k", {"k": torch.zeros(3, 3, HEADS, DIM)}),
    ("k", {"k": torch.zeros(4, 3, HEADS, DIM, dtype=torch.float64)}),
    ("v", {"v": torch.zeros(4, 2, HEADS, DIM_V)}),
    ("cache_seqlens", {"cache_seqlens": None}),
    ("cache_seqlens", {"cache_seqlens": -1}),
    ("cache_seqlens", {"cache_seqlens": 1.5}),
    ("cache_seqlens", {"cache_seqlens": [1, 2, 3, 4]}),
    ("cache_seqlens", {"cache_seqlens": ints(1, 2, 3)}),
    ("cache_seqlens", {"cache_seqlens": torch.zeros(4)}),
    ("cache_seqlens", {"cache_seqlens": ints(5, 0, -1, 3)}),
    ("cache_seqlens", {"cache_seqlens": ints(5, 0, 1, 3).long() + 2**32}),
    ("table", {"table": torch.full((4, 8), 2**32, dtype=torch.int64)}),
    ("table", {"cache_seqlens": ints(5, 0, 30, 3)}),
    ("table", {"table": torch.zeros(3, 8, dtype=torch.int32)}),
    ("table", {"table": torch.zeros(4, 8)}),
    ("table", {"table": torch.full((4, 8), 34, dtype=torch.int32)}),
    ("table", {"table": torch.full((4, 8), -1, dtype=torch.int32)}),
    ("table", {"table": torch.zeros(4, 8, dtype=torch.int32)}),
    ("cache_batch_idx", {"cache_batch_idx": TENSOR}),
    ("cache_leftpad", {"cache_leftpad": ints(0, 1, 0, 0)}),
    ("cache_leftpad", {"cache_leftpad": ints(-1, 0, 0, 0)}),
    ("cache_leftpad", {"cache_leftpad": torch.zeros(5, dtype=torch.int32)}),
    ("rotary_sin", {"rotary_cos": COS}),
    ("rotary_cos", {"rotary_sin": SIN}),
    ("rotary_cos", {"rotary_cos": COS, "rotary_sin": SIN[:, :4]}),
    ("rotary_cos", {"rotary_cos": angles(9)[0], "rotary_sin": angles(9)[1]}),
    ("rotary_cos", {"rotary_cos": COS, "rotary_sin": SIN, "k": None, "v": None}),
    ("rotary_cos", {"rotary_cos": COS[:, :0], "rotary_sin": SIN[:, :0]}),
    ("rotary_cos", {"rotary_cos": COS[:23], "rotary_sin": SIN[:23]}),
    ("softmax_scale", {"softmax_scale": float("nan")}),
    ("softmax_scale", {"softmax_scale": torch.ones(1)}),
    ("window_size", {"window_size": 4}),
    ("window_size", {"window_size": (1, 2, 3), "rotary_cos": COS, "rotary_sin": SIN}),
    ("softcap", {"softcap": -1.0}),
    ("num_splits", {"num_splits": -1}),
    ("num_splits", {"num_splits": True}),
]  # fmt: skip


def refused(version: int, name: str, wrong: dict[str, Any], page_size: int = 4) -> None:
    """An error of this name, with a hint, and a cache as it was."""
    arguments = make(page_size) if version == 2 else third(make(page_size))
    table = "block_table" if version == 2 else "page_table"
    wrong = {table if key == "table" else key: value for key, value in wrong.items()}
    arguments |= wrong
    caches = [arguments[x] for x in ("k_cache", "v_cache") if isinstance(arguments[x], torch.Tensor)]
    before = [x.clone() for x in caches]
    function: Any = (flash_attn if version == 2 else flash_attn_interface).flash_attn_with_kvcache
    with pytest.raises((InputError, UnsupportedError), match=f"^{table if name == 'table' else name}: ") as caught:
        function(**arguments)
    assert caught.value.hint
    assert caught.value.expected
    for x, was in zip(caches, before, strict=True):
        if x.dtype != torch.float8_e4m3fn:
            torch.testing.assert_close(x, was, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("case", range(len(BOTH)))
def test_refused_before_anything_is_written(case: int, version: int) -> None:
    refused(version, *BOTH[case])


CONTIGUOUS: list[tuple[str, dict[str, Any]]] = [
    ("cache_seqlens", {"cache_seqlens": ints(5, 0, 30, 3)}),
    ("cache_batch_idx", {"cache_batch_idx": ints(0, 1, 2, 6)}),
    ("cache_batch_idx", {"cache_batch_idx": ints(0, 1, 2, 1), "cache_seqlens": 4}),
    ("cache_batch_idx", {"cache_batch_idx": ints(0, 1, 2)}),
    ("k_cache", {"cache_batch_idx": None, "k_cache": torch.zeros(3, 32, HEADS, DIM),
                 "v_cache": torch.zeros(3, 32, HEADS, DIM_V)}),
    ("cache_leftpad", {"cache_leftpad": TENSOR, "k_cache": torch.zeros(6 * 32 * 32 + 6).as_strided(
        (6, 32, HEADS, DIM), (1025, 32, 16, 1))}),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CONTIGUOUS)))
def test_refused_of_a_contiguous_cache(case: int) -> None:
    refused(2, *CONTIGUOUS[case], page_size=0)
    refused(3, *CONTIGUOUS[case], page_size=0)


SLOPES: list[Any] = [torch.ones(3), [1.0], torch.ones(4, dtype=torch.int64), torch.ones(4, device="meta")]
SUMS = ints(0, 1, 2, 3, 4)
OF_THE_THIRD: list[tuple[str, dict[str, Any]]] = [
    ("qv", {"qv": torch.zeros(4, 4, 4, DIM_V)}),
    ("attention_chunk", {"attention_chunk": 16}),
    ("scheduler_metadata", {"scheduler_metadata": 3}),
    ("pack_gqa", {"pack_gqa": 2}),
    ("sm_margin", {"sm_margin": -1}),
    ("max_seqlen_q", {"max_seqlen_q": "4"}),
    ("q_descale", {"q_descale": torch.ones(4)}),
    ("k_descale", {"k_descale": 1.0}),
    ("v_descale", {"v_descale": torch.ones(4, HEADS, device="meta")}),
    ("rotary_seqlens", {"rotary_seqlens": torch.zeros(3, dtype=torch.int32)}),
    ("rotary_cos", {"rotary_seqlens": ints(0, 61, 0, 0), "rotary_cos": COS, "rotary_sin": SIN, "causal": True}),
    ("rotary_cos", {"rotary_seqlens": ints(0, -1, 0, 0), "rotary_cos": COS, "rotary_sin": SIN}),
    ("q", {"cu_seqlens_q": SUMS}),
    ("cu_seqlens_q", {"cu_seqlens_q": SUMS[:0], "q": torch.zeros(4, 4, DIM)}),
    ("cu_seqlens_q", {"cu_seqlens_q": ints(0, 1, 2, 3, 5), "q": torch.zeros(4, 4, DIM)}),
    ("cu_seqlens_q", {"cu_seqlens_q": ints(0, 3, 2, 3, 4), "q": torch.zeros(4, 4, DIM)}),
    ("k", {"cu_seqlens_k_new": SUMS}),
    ("cu_seqlens_k_new", {"cu_seqlens_k_new": SUMS[1:], "k": torch.zeros(4, 2, DIM), "v": torch.zeros(4, 2, DIM_V)}),
    ("cu_seqlens_k_new", {"cu_seqlens_k_new": SUMS * 2, "k": torch.zeros(4, 2, DIM), "v": torch.zeros(4, 2, DIM_V)}),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(OF_THE_THIRD)))
def test_refused_of_the_third(case: int) -> None:
    refused(3, *OF_THE_THIRD[case])


@pytest.mark.parametrize("case", range(len(SLOPES)))
def test_refused_slopes(case: int) -> None:
    refused(2, "alibi_slopes", {"alibi_slopes": SLOPES[case]})


def test_kinds_of_errors() -> None:
    for wrong in ({"qv": TENSOR}, {"attention_chunk": 1}):
        with pytest.raises(UnsupportedError):
            flash_attn_interface.flash_attn_with_kvcache(**third(make(4)), **wrong)
    q = torch.zeros(1, 1, 2, 8, dtype=torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match=r"^q: got torch.float8_e4m3fn"):
        flash_attn_interface.flash_attn_with_kvcache(q, q, q, cache_seqlens=1)


def test_scheduler_metadata() -> None:
    """What it returns is taken, and changes nothing."""
    arguments = {**third(make(4)), "causal": True}
    lengths = arguments["cache_seqlens"]
    metadata = flash_attn_interface.get_scheduler_metadata(4, 4, 32, 4, HEADS, DIM, lengths, page_size=4, causal=True)
    assert metadata.dtype == torch.int32
    assert metadata.ndim == 1
    o = flash_attn_interface.flash_attn_with_kvcache(
        **arguments, scheduler_metadata=metadata, num_splits=4, pack_gqa=True, sm_margin=2
    )
    assert isinstance(o, torch.Tensor)
    plain = flash_attn_interface.flash_attn_with_kvcache(**{**third(make(4)), "causal": True})
    assert isinstance(plain, torch.Tensor)
    assert torch.equal(o, plain)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("batch_size", {"batch_size": -1}), ("headdim_v", {"headdim_v": 1.0}), ("page_size", {"page_size": "4"}),
        ("attention_chunk", {"attention_chunk": 8}), ("window_size", {"window_size": 3}),
        ("num_splits", {"num_splits": -1}),
        ("cache_seqlens", {"cache_seqlens": lengths[:3]}), ("cache_seqlens", {"cache_seqlens": 3}),
    ]  # fmt: skip
    good = {"batch_size": 4, "max_seqlen_q": 4, "max_seqlen_k": 32, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 16}
    for name, change in wrong:
        with pytest.raises((InputError, UnsupportedError), match=f"^{name}: "):
            flash_attn_interface.get_scheduler_metadata(**{**good, "cache_seqlens": lengths, **change})


@pytest.mark.parametrize("page_size", [0, 4])
def test_nothing_is_read_from_a_gpu(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values, of which none can be read, reach the write and the attention."""
    reached: list[Any] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        reached.append(options["layout"])
        return q[..., :DIM_V], torch.zeros(*q.shape[:-3], q.shape[-2], q.shape[-3], device="meta")

    monkeypatch.setattr(tw, "attention_with_lse", attention)
    monkeypatch.setattr(tw, "kv_write", lambda *tensors, rope: reached.append(tensors[-1] if rope else None))
    arguments = {**make(page_size), "rotary_cos": COS, "rotary_sin": SIN, "cache_leftpad": TENSOR}
    arguments |= {"alibi_slopes": torch.ones(4), "softcap": 1.0, "causal": True}
    meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with pytest.raises(RuntimeError):  # whoever reads a value of these
        meta["cache_seqlens"][-1].item()
    flash_attn.flash_attn_with_kvcache(**meta)
    del meta["alibi_slopes"], meta["cache_leftpad"]
    packed = {name: meta[name].flatten(0, 1) for name in ("q", "k", "v")}
    sums = {"cu_seqlens_q": SUMS.to("meta"), "cu_seqlens_k_new": SUMS.to("meta")}
    scale = torch.ones(4, HEADS, device="meta")
    flash_attn_interface.flash_attn_with_kvcache(
        **{**third(meta), **packed}, **sums, q_descale=scale, k_descale=scale, v_descale=scale
    )
    assert [getattr(x, "seqlens_k", x).device.type for x in reached] == ["meta"] * 4


def test_pages_in_varlen() -> None:
    """Keys in pages give what packed keys give, `S_dmask` too; a gradient is refused."""
    counts, lengths, size = [3, 0, 5, 1], [9, 4, 5, 0], 4
    q, k, v = (x.detach() for x in leaves((9, 4, DIM), (18, HEADS, DIM), (18, HEADS, DIM_V)))
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (counts, lengths))
    table = torch.tensor([[7, 2, 5], [1, -1, 99], [0, 3, -1], [50, 50, 50]], dtype=torch.int32)
    pools = [torch.full((8, size, HEADS, x.shape[-1]), torch.nan) for x in (k, v)]
    for r, n in enumerate(lengths):
        for t in range(n):
            for pool, x in zip(pools, (k, v), strict=True):
                pool[table[r, t // size], t % size] = x[cu_k[r] + t]
    options: dict[str, Any] = {
        "causal": True,
        "window_size": (6, 0),
        "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]),
    }
    ends = (cu_q, cu_k, 5, 9)
    want = flash_attn.flash_attn_varlen_func(q, k, v, *ends, **options, return_attn_probs=True)
    got = flash_attn.flash_attn_varlen_func(q, *pools, *ends, **options, return_attn_probs=True, block_table=table)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)
    with pytest.raises(UnsupportedError):
        flash_attn.flash_attn_varlen_func(q.requires_grad_(), *pools, *ends, block_table=table)
    bad: list[tuple[str, Any, Any]] = [
        ("block_table", pools, [[0]]), ("k", (k, v), table), ("block_table", pools, table[:3]),
        ("layout seqlens_k", pools, table[:, :2].contiguous()), ("block_table", pools, table[0]),
    ]  # fmt: skip
    for name, keys, pages in bad:
        with pytest.raises(InputError, match=f"^{name}: ") as caught:
            flash_attn.flash_attn_varlen_func(q.detach(), *keys, *ends, block_table=pages)
        assert caught.value.hint
