"""Arguments that are True or False: every public function and adapter refuses anything else."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.core.flags import check_flags

MODULES = (
    "tilewise",
    "tilewise.kv",
    "tilewise.nn",
    "tilewise.quant",
    "tilewise.adapters.fastvideo",
    "tilewise.adapters.flash_attn",
    "tilewise.adapters.flash_attn_interface",
    "tilewise.adapters.flashinfer",
    "tilewise.adapters.flex",
    "tilewise.adapters.sageattention",
    "tilewise.adapters.sdpa",
    "tilewise.adapters.spas_sage_attn",
    "tilewise.adapters.transformers",
    "tilewise.adapters.transformers_fused",
)
X = torch.ones(1, 4, 2, 8)
ROWS = X[0]
SIZES = {"num_layers": 1, "num_pages": 2, "page_size": 4, "num_heads_kv": 2, "head_dim": 8}
CU = torch.tensor([0, 4], dtype=torch.int32)
ONE = torch.tensor([1], dtype=torch.int32)
WORK = torch.empty(1, dtype=torch.uint8)
TABLE = (
    torch.tensor([0, 1], dtype=torch.int32),
    torch.tensor([0], dtype=torch.int32),
    ONE * 4,
)  # indptr, indices, last
SUMMED = tw.Rope(torch.ones(4, 4), torch.zeros(4, 4), torch.arange(4))
MASK = torch.ones(1, 2, 1, 1, dtype=torch.bool)
CACHE = torch.ones(1, 2, 4, 2, 8)
SELF = {"q": X, "k": X, "v": X}
PLAN = {
    "plan": (CU, *TABLE, 2, 2, 8, 4),
    "forward": (ROWS, CACHE),
}


def _packed(count: int) -> torch.Tensor:
    return torch.ones(1, 4, count, 2, 8)


def _module() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


VARLEN = {"max_seqlen_q": 4, "max_seqlen_k": 4}
# of each public name arguments of a call that is right but for its flag
GIVEN: dict[str, dict[str, Any]] = {
    "attention": SELF,
    "attention_with_lse": SELF,
    "plan": SELF,
    "Paged": {"block_table": torch.zeros(1, 1, dtype=torch.int32), "seqlens_k": ONE},
    "Rope": {"cos": torch.ones(4, 4), "sin": torch.ones(4, 4), "positions": torch.arange(4)},
    "Select": {"parts": tw.TopK(0.5)},
    "SparQ": {"rank": 2, "keys": 2},
    "TokenOrder": {"canvas": (2, 2), "tile": 1},
    "document": {"ids": torch.zeros(4, dtype=torch.int32)},
    "neighborhood": {"shape": (2, 2), "window": 1},
    "quantize_qkv": SELF | {"scheme": tw.Sage2()},
    "relative_bias": {"table": torch.ones(32, 2)},
    "rope": {"q": X, "rope": SUMMED},
    "sliding_tile": {"canvas": (2, 2), "tile": 1, "window": 1},
    "KVCache": SIZES,
    "PagePool": SIZES,
    "RMSNorm": {"normalized_shape": 8},
    "LayerNorm": {"normalized_shape": 8},
    "sliding_tile_attention": SELF | {"window_size": [(1, 1, 1)] * 4, "text_length": 0, "seq_shape": "1x1x2"},
    "flash_attn_func": SELF,
    "flash_attn_kvpacked_func": {"q": X, "kv": _packed(2)},
    "flash_attn_qkvpacked_func": {"qkv": _packed(3)},
    "flash_attn_varlen_func": dict(q=ROWS, k=ROWS, v=ROWS, cu_seqlens_q=CU, cu_seqlens_k=CU, **VARLEN),
    "flash_attn_varlen_kvpacked_func": dict(q=ROWS, kv=_packed(2)[0], cu_seqlens_q=CU, cu_seqlens_k=CU, **VARLEN),
    "flash_attn_varlen_qkvpacked_func": {"qkv": _packed(3)[0], "cu_seqlens": CU, "max_seqlen": 4},
    "flash_attn_with_kvcache": {"q": X, "k_cache": X, "v_cache": X},
    "get_scheduler_metadata": dict.fromkeys(("batch_size", "max_seqlen_q", "max_seqlen_k", "headdim"), 1)
    | {"num_heads_q": 2, "num_heads_kv": 2, "cache_seqlens": ONE},
    "create_block_mask": {"mask_mod": tw.causal, "B": 1, "H": 1, "Q_LEN": 4, "KV_LEN": 4, "device": "cpu"},
    "flex_attention": {"query": X, "key": X, "value": X},
    "scaled_dot_product_attention": {"query": X, "key": X, "value": X},
    "attention_forward": {"module": _module(), "query": X, "key": X, "value": X},
    "fuse": {"model": _module()},
    "sageattn_varlen": dict(q=ROWS, k=ROWS, v=ROWS, cu_seqlens_q=CU, cu_seqlens_k=CU, **VARLEN),
    "single_decode_with_kv_cache": {"q": X[0, 0], "k": ROWS, "v": ROWS},
    "single_prefill_with_kv_cache": {"q": ROWS, "k": ROWS, "v": ROWS},
    "single_prefill_with_kv_cache_return_lse": {"q": ROWS, "k": ROWS, "v": ROWS},
    "block_sparse_sage2_attn_cuda": SELF | {"mask_id": MASK},
}
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "BatchAttention": ({"device": "cpu"}, {"plan": (CU, *TABLE, 2, 2, 8, 8, 4)}),
    "BatchDecodeWithPagedKVCacheWrapper": (
        {"float_workspace_buffer": WORK},
        {"plan": (*TABLE, 2, 2, 8, 4), "run": (ROWS[:1], CACHE), "forward": (ROWS[:1], CACHE)},
    ),
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": (
        {"workspace_buffer": WORK, "indptr_buffer": CU, "indices_buffer": ONE, "last_page_len_buffer": ONE},
        {},
    ),
    "BatchPrefillWithPagedKVCacheWrapper": (
        {"float_workspace_buffer": WORK},
        {"plan": (CU, *TABLE, 2, 2, 8, 4), "run": (ROWS, CACHE), "forward": (ROWS, CACHE)},
    ),
    "BatchPrefillWithRaggedKVCacheWrapper": (
        {"float_workspace_buffer": WORK},
        {"plan": (CU, CU, 2, 2, 8), "run": (ROWS, ROWS, ROWS), "forward": (ROWS, ROWS, ROWS)},
    ),
    "MultiLevelCascadeAttentionWrapper": (
        {"num_levels": 1, "float_workspace_buffer": WORK},
        {"plan": ([CU], *([x] for x in TABLE), 2, 2, 8, 4)},
    ),
}
OTHERS = {"CrossEntropyLoss", "Explanation", "Quantized", "AuxRequest"}  # take None alone, are results, are PyTorch's
IN_OPTIONS = {  # taken by **options
    "plan": ("non_blocking", "disable_split_kv"),
    "run": ("enable_pdl",),
}


def _flags(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [x.name for x in parameters if isinstance(x.default, bool) or "bool" in str(x.annotation).split(" | ")]


def _public() -> Iterator[tuple[str, str, Callable[..., Any], str]]:
    for name in MODULES:
        module = importlib.import_module(name)
        for public in module.__all__:
            value = getattr(module, public)
            if callable(value) and public not in WRAPPERS and public not in OTHERS:
                for flag in _flags(value):
                    yield name, public, value, flag


@pytest.mark.parametrize(
    ("module", "public", "function", "flag"), [pytest.param(*x, id=f"{x[0]}-{x[1]}-{x[3]}") for x in _public()]
)
def test_no_word_is_a_flag(module: str, public: str, function: Callable[..., Any], flag: str) -> None:
    given = dict(GIVEN.get(public, SELF), **{flag: "no"})
    if public == "Paged":  # checked where it is used
        layout = function(**given)
        given, function = SELF | {"k": CACHE[:, 0], "v": CACHE[:, 0], "layout": layout}, tw.attention
    parts = (given.pop("parts"),) if "parts" in given else ()
    with pytest.raises(InputError, match=flag) as caught:
        function(*parts, **given)
    assert "'no'" in str(caught.value)
    assert "True or False" in str(caught.value)


def _methods() -> Iterator[tuple[str, str, str]]:
    flashinfer = importlib.import_module("tilewise.adapters.flashinfer")
    for name, (_, methods) in WRAPPERS.items():
        wrapper = getattr(flashinfer, name)
        for flag in _flags(wrapper):
            yield name, "", flag
        for method in methods:
            function = getattr(wrapper, method)
            takes_more = any(x.kind is x.VAR_KEYWORD for x in inspect.signature(function).parameters.values())
            for flag in (*_flags(function), *(IN_OPTIONS.get(method, ()) if takes_more else ())):
                yield name, method, flag


@pytest.mark.parametrize(("name", "method", "flag"), list(_methods()))
def test_nor_of_a_wrapper(name: str, method: str, flag: str) -> None:
    wrapper = getattr(importlib.import_module("tilewise.adapters.flashinfer"), name)
    made, methods = WRAPPERS[name]
    if not method:
        with pytest.raises(InputError, match=flag):
            wrapper(**made, **{flag: "no"})
        return
    known = wrapper(**made)
    if method != "plan":
        known.plan(*methods["plan"], q_data_type=torch.float32)
    with pytest.raises(InputError, match=flag):
        getattr(known, method)(*methods[method], **{flag: "no"})


@pytest.mark.parametrize("value", ["no", "", "False", 0, 1, 1.0, None, [True], torch.tensor(True)])
def test_what_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"^causal: got"):
        check_flags(deterministic=True, causal=value)


def test_what_is_taken() -> None:
    check_flags(a=True, b=False, c=np.bool_(True))
    torch.compile(
        lambda x: (check_flags(causal=x.shape[1] > 1), x + 1)[1], backend="eager", fullgraph=True, dynamic=True
    )(X)


@pytest.mark.parametrize("select", [None, tw.TopPages(2)])
@pytest.mark.parametrize("flag", ["deterministic", "batch_invariant"])
def test_selected_pages_look_at_flags_too(select: tw.TopPages | None, flag: str) -> None:
    pages = CACHE[:, 0].contiguous()
    layout = tw.Paged(torch.zeros(1, 1, dtype=torch.int32), ONE, summaries=tw.PageSummaries.of(pages, pages))
    with pytest.raises(InputError, match=flag):
        tw.attention(X[:, :1], pages, pages, layout=layout, select=select, **{flag: "no"})


@pytest.mark.parametrize("flag", ["similarity", "variance"])
def test_tile_means_look_at_flags_too(flag: str) -> None:
    from tilewise.ops.tile_means import tile_means

    with pytest.raises(InputError, match=flag):
        tile_means(X, 2, **{flag: "no"})


@pytest.mark.parametrize("method", ["match", "start"])
def test_prefixes_look_at_flags_too(method: str) -> None:
    index = tw.kv.PrefixCache(tw.kv.PageAllocator(2, 4))
    with pytest.raises(InputError, match="whole"):
        getattr(index, method)([1, 2], whole="no")
