"""tilewise: write attention as a formula; get a fused kernel for training, serving, quantized and sparse attention."""

import importlib as _importlib
import typing as _typing

from tilewise.formula.formula import Mask, Score, mask, score
from tilewise.formula.grids import neighborhood, sliding_tile
from tilewise.formula.library import (
    blocks,
    causal,
    chunked,
    dilated,
    document,
    explicit,
    lengths,
    prefix,
    sinks,
    tree,
    tree_times,
    window,
)
from tilewise.formula.order import TokenOrder
from tilewise.formula.scores import alibi, bias, relative_bias, sigmoid_score, softcap, tanh_score
from tilewise.frequencies import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
    rope_tables,
)
from tilewise.layouts import Dense, Packed, Paged, PageSummaries
from tilewise.ops.attention import Explanation, attention, attention_with_lse, plan, why
from tilewise.ops.attention.choice import Selected
from tilewise.ops.attention.planned import AttentionPlan
from tilewise.ops.attention.selected import select_tiles
from tilewise.ops.cross_entropy import cross_entropy, linear_cross_entropy
from tilewise.ops.glu import geglu, reglu, swiglu
from tilewise.ops.kv_write import copy_pages, kv_write
from tilewise.ops.merge import merge, merge_states
from tilewise.ops.norm import layer_norm, rms_norm
from tilewise.ops.page_summaries import summarize_pages
from tilewise.ops.quantize import quantize_qkv
from tilewise.ops.rope import rope, rope_qkv
from tilewise.ops.sampling import Penalties, Sampled, combine_shards, sample
from tilewise.ops.softmax import log_softmax, softmax
from tilewise.quant import FA3FP8, FP8, Sage, Sage1, Sage2, Sage2pp
from tilewise.rotary import Rope
from tilewise.schedule.page_selection import SparQ, TopPages
from tilewise.schedule.selection import Select, Sparge, Threshold, TopK
from tilewise.selections import load_selections

if _typing.TYPE_CHECKING:
    from tilewise import engine, errors, kv, nn
    from tilewise.kv import KVCache

__version__ = "0.2.0.dev0"

__all__ = [
    "FA3FP8",
    "FP8",
    "AttentionPlan",
    "Dense",
    "DynamicScaling",
    "Explanation",
    "KVCache",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Mask",
    "Packed",
    "PageSummaries",
    "Paged",
    "Penalties",
    "Rope",
    "Sage",
    "Sage1",
    "Sage2",
    "Sage2pp",
    "Sampled",
    "Score",
    "Select",
    "Selected",
    "SparQ",
    "Sparge",
    "Threshold",
    "TokenOrder",
    "TopK",
    "TopPages",
    "YarnScaling",
    "alibi",
    "attention",
    "attention_with_lse",
    "bias",
    "blocks",
    "causal",
    "chunked",
    "combine_shards",
    "copy_pages",
    "cross_entropy",
    "dilated",
    "document",
    "engine",
    "errors",
    "explicit",
    "geglu",
    "kv",
    "kv_write",
    "layer_norm",
    "lengths",
    "linear_cross_entropy",
    "load_selections",
    "log_softmax",
    "mask",
    "merge",
    "merge_states",
    "neighborhood",
    "nn",
    "plan",
    "prefix",
    "quantize_qkv",
    "reglu",
    "relative_bias",
    "rms_norm",
    "rope",
    "rope_qkv",
    "rope_tables",
    "sample",
    "score",
    "select_tiles",
    "sigmoid_score",
    "sinks",
    "sliding_tile",
    "softcap",
    "softmax",
    "summarize_pages",
    "swiglu",
    "tanh_score",
    "tree",
    "tree_times",
    "why",
    "window",
]

_LAZY = {"KVCache": "tilewise.kv"} | {name: f"tilewise.{name}" for name in ("engine", "errors", "kv", "nn")}


def __getattr__(name: str) -> _typing.Any:
    """Import the parts that a program may do without when it first asks for them."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(_LAZY[name])
    own = _LAZY[name] == f"{__name__}.{name}"  # else a name in it: tilewise.engine has a module engine, too
    globals()[name] = found = module if own else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
