"""Kernel families: which source files a receipt or a benchmark record vouches for, and which tests prove them.

This is the one place that lists them. A family's hash changes with what its sources define, so "verified on H200" in
the README and a record's `sources` key can never speak of code that has since changed (`tools.same_code` has the rule).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from tools.syntax import sources_hash

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Family:
    """One set of kernels.

    `sources` and `tests` are glob patterns relative to the root, `rows` names of the dispatch table of `operation`,
    `ci` what continuous integration, which has no GPU, does with kernels for one, `compiled` the rows of
    `tools.variants` whose kernels it has.
    """

    name: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    rows: tuple[str, ...]
    ci: str = ""
    operation: str = "attention"
    compiled: tuple[str, ...] = ()

    def files(self, root: Path = ROOT) -> list[Path]:
        """The family's source files, sorted."""
        return sorted({path for pattern in self.sources for path in root.glob(pattern) if path.is_file()})

    def hash(self, root: Path = ROOT) -> str:
        """Twelve hexadecimal digits over what the sources define (`tools.syntax`); "none" where no file matches."""
        return sources_hash(self.files(root), root)


_SCHEDULE = "src/tilewise/schedule/"
_TILES = tuple(_SCHEDULE + f"{name}.py" for name in ("__init__", "page_selection", "rule", "selection", "tilemap"))
_FORMULA = ("src/tilewise/formula/*.py", *_TILES, "src/tilewise/core/[pr]*.py")
_ATTENTION = "src/tilewise/ops/attention/"
_DISPATCH = "src/tilewise/core/dispatch.py"
_LAUNCH = "src/tilewise/ops/triton_*.py"
_SHARED = (
    _DISPATCH,
    "src/tilewise/layout*.py",
    "src/tilewise/quant/c*.py",
    *(
        _ATTENTION + name
        for name in (
            "__init__.py",
            "arguments.py",
            "problem.py",
            "facts.py",
            "lengths.py",
            "rows/needs.py",
            "composed.py",
            "torch_op.py",
            "planned.py",
            "gradient.py",
        )
    ),
)

_PORTABLE = (
    *_FORMULA,
    *_SHARED,
    _LAUNCH,
    *(f"src/tilewise/tiles/{name}.py" for name in ("arithmetic", "dropout", "early", "load", "visit")),
    *(_ATTENTION + f"triton_{name}.py" for name in ("attention", "bwd", "decode", "fwd", "keys", "lists", "plans")),
    *(_ATTENTION + name for name in ("configs.py", "variant.py")),
)

_CODES = "src/tilewise/tiles/codes.py"
_ROTARY = "src/tilewise/tiles/rotary.py"
_PAGED = (
    _CODES,
    *(_ATTENTION + f"triton_{name}.py" for name in ("channels", "paged", "parts", "planned", "prefixes", "work")),
    _ATTENTION + "sharing.py",
    _SCHEDULE + "sharing.py",
    _SCHEDULE + "worklist.py",
)

_HOPPER = tuple(f"src/tilewise/tiles/{name}.py" for name in ("gluon_api", "hopper"))
_HOPPER_TILED = (
    _SCHEDULE + "whole.py",
    *(
        _ATTENTION + f"gluon_{name}.py"
        for name in ("attention", "boxes", "fixed", "sm90_fetch", "sm90_formula", "sm90_fwd", "sm90_[bmprs]*")
    ),
)
_HOPPER_DECODE = (
    "src/tilewise/tiles/gluon_codes.py",
    *(_ATTENTION + f"gluon_{name}.py" for name in ("decode", "sm90_decode*", "sm90_fold", "sm90_gather", "sm90_pages")),
)

_FAR = "tests/gpu/test_far_rows.py"
_GPU_TESTS = ("tests/gpu/test_attention_[clpr]*.py", "tests/gpu/test_adapters.py", "tests/gpu/test_sanitizer.py", _FAR)
_PAGED_TESTS = ("tests/gpu/test_kept.py", "tests/gpu/test_paged.py", "tests/gpu/test_shared_prefixes.py")
_CI = "interpreted, compiled for sm_80, sm_90, sm_100"

_MERGE = "src/tilewise/ops/merge/"
_CPU = tuple(
    _ATTENTION + name
    for name in ("cpu.py", "cpu_bias.py", "cpu_decode.py", "cpu_fused.py", "cpu_parts.py", "variant.py")
)

_MERGE_SHARED = (
    "src/tilewise/core/[er]*.py",
    _DISPATCH,
    *(_MERGE + name for name in ("__init__.py", "problem.py", "table.py", "torch_op.py")),
)

_WRITE = "src/tilewise/ops/kv_write/"
_WRITE_SHARED = (
    "src/tilewise/core/[er]*.py",
    "src/tilewise/quant/c*.py",
    "src/tilewise/rotary.py",
    _DISPATCH,
    *(_WRITE + name for name in ("__init__.py", "problem.py", "table.py", "torch_op.py")),
)

_PROLOGUE = "src/tilewise/ops/qkv_prologue/"
_PROLOGUE_SHARED = (*_WRITE_SHARED, *(_PROLOGUE + name for name in ("__init__.py", "problem.py", "table.py")))

_OF_TOKENS = (
    "src/tilewise/schedule/page_selection.py",
    "src/tilewise/tiles/early.py",
    "src/tilewise/tiles/log_sum.py",
    _ATTENTION + "selected_pages.py",
)

# operations on rows, or blocks of rows, made by `ops/operation.py`, and the sources of theirs beside the folder
NEIGHBOURS: dict[str, tuple[str, ...]] = {
    "norm": ("src/tilewise/quant/c*.py", _CODES),
    "softmax": (),
    "cross_entropy": (),
    "glu": (),
    "rope": ("src/tilewise/rotary.py", "src/tilewise/ops/rope/torch_op.py", _ROTARY),
    "linear": (),
    "tile_means": ("src/tilewise/tiles/visit.py",),
    "tile_scores": (),
    "select": (
        *_TILES,
        "src/tilewise/ops/tile_means/*.py",
        "src/tilewise/ops/tile_scores/*.py",
        *(_ATTENTION + name for name in ("choice.py", "paged_rows.py", "selected.py")),
    ),
    "page_summaries": ("src/tilewise/layout*.py", "src/tilewise/ops/kv_write/*.py"),
    "page_choice": (
        "src/tilewise/schedule/page_selection.py",
        "src/tilewise/ops/select/triton_select.py",
        _ATTENTION + "selected_pages.py",
    ),
    "query_parts": (
        "src/tilewise/schedule/page_selection.py",
        "src/tilewise/tiles/early.py",
        "src/tilewise/tiles/largest.py",
        _ATTENTION + "selected_pages.py",
    ),
    "sampling": ("src/tilewise/core/philox.py", "src/tilewise/ops/sampling/cpu_noise.py"),
    "token_choice": _OF_TOKENS,
    "token_rest": _OF_TOKENS,
    "token_scores": _OF_TOKENS,
    "quantize": (
        "src/tilewise/layout*.py",
        "src/tilewise/quant/*.py",
        _CODES,
        "src/tilewise/rotary.py",
        _ROTARY,
        "src/tilewise/tiles/early.py",
        "src/tilewise/tiles/visit.py",
        _ATTENTION + "arguments.py",
    ),
}


_OF_PAGES = ("page_choice", "query_parts", "token_choice", "token_rest", "token_scores")
_FUSED = ("norm", "cross_entropy", "glu", "rope")  # what a fused model of transformers runs


def _neighbour(name: str) -> tuple[Family, Family]:
    """The families of one of them: its Triton kernels, its CPU path."""
    folder = f"src/tilewise/ops/{name}/"
    shared = (
        "src/tilewise/core/[er]*.py",
        _DISPATCH,
        "src/tilewise/ops/operation.py",
        *NEIGHBOURS[name],
        *(folder + part for part in ("__init__.py", "problem.py", "table.py")),
    )
    kernels = (*shared, _LAUNCH, folder + "triton_*.py", "src/tilewise/tiles/arithmetic.py")
    more = ["tests/gpu/test_fused.py"] if name in _FUSED else []
    more += [_FAR] if name in (*_FUSED, "linear", "softmax", "quantize") else []
    more += ["tests/gpu/test_attention_select.py"] if name == "select" else []
    more += ["tests/gpu/test_selected_pages.py"] if name in _OF_PAGES else []
    tests = (f"tests/gpu/test_{name}.py", *more)
    return (
        Family(f"{name}_triton", kernels, tests, ("triton",), _CI, name, (name,)),
        Family(f"{name}_cpu", (*shared, folder + "cpu.py"), (f"tests/ops/{name}/*.py",), ("cpu",), "", name),
    )


def _writes(
    name: str, shared: tuple[str, ...], beside: tuple[str, ...] = (), tests: tuple[str, ...] = (), more: str = ""
) -> tuple[Family, Family]:
    """The families of an operation that writes into pages: its Triton kernels, its CPU path and the row `more`;
    `beside` are the folders of operations whose implementations it calls.
    """
    folders = (f"src/tilewise/ops/{name}/", *beside)
    kernels = (*shared, *(folder + "triton_*.py" for folder in folders), _LAUNCH, _CODES, _ROTARY)
    rows = ("cpu", more) if more else ("cpu",)
    host = (*shared, *(folder + "cpu.py" for folder in folders), *(folders[0] + f"{row}.py" for row in rows[1:]))
    return (
        Family(f"{name}_triton", kernels, (f"tests/gpu/test_{name}.py", *tests), ("triton",), _CI, name, (name,)),
        Family(f"{name}_cpu", host, (f"tests/ops/{name}/*.py",), rows, "", name),
    )


def _layer(name: str, attention: tuple[str, ...], kind: int) -> Family:
    """What a layer of the demo's model runs: attention, and what stands beside it by the family of this `kind`."""
    beside = (source for other in ("norm", "glu", "rope") for source in _neighbour(other)[kind].sources)
    model = tuple(f"src/tilewise/demo/{part}.py" for part in ("model", "operators"))
    compiled = () if kind else ("triton", "hopper", "norm", "glu", "rope")
    return Family(name, (*attention, *beside, *model), ("tests/demo/test_model.py",), (), compiled=compiled)


_IN_FEW_BITS = (
    *_neighbour("quantize")[0].sources,
    "src/tilewise/ops/quantize/*.py",
    *(_ATTENTION + name for name in ("codes.py", "paged_rows.py")),
)

_TRITON_CODES = (_ATTENTION + "triton_codes*.py", _ATTENTION + "rows/triton_codes.py", _CODES)
_HOPPER_CODES = (
    *(_ATTENTION + f"gluon*_{name}.py" for name in ("codes", "code_scales")),
    _ATTENTION + "rows/hopper_codes.py",
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="attention_triton",
            sources=(*_PORTABLE, _ATTENTION + "rows/triton.py"),
            tests=_GPU_TESTS,
            rows=("triton", "triton_decode"),
            ci=_CI,
            compiled=("triton", "triton_decode"),
        ),
        Family(
            name="attention_paged",
            sources=(*_PORTABLE, *_PAGED, _ATTENTION + "rows/paged.py"),
            tests=_PAGED_TESTS,
            rows=("triton_paged",),
            ci=_CI,
            compiled=("triton_paged",),
        ),
        Family(
            name="attention_decode_hopper",
            sources=(*_PORTABLE, *_PAGED, *_HOPPER, *_HOPPER_DECODE, _ATTENTION + "rows/decode.py"),
            tests=(*_PAGED_TESTS, "tests/gpu/test_paged_decode.py"),
            rows=("hopper_decode",),
            ci="compiled for sm_90",
            compiled=("hopper_decode",),
        ),
        Family(
            name="attention_hopper",
            sources=(*_PORTABLE, *_HOPPER, *_HOPPER_TILED, _ATTENTION + "rows/hopper.py"),
            tests=(*_GPU_TESTS, "tests/gpu/test_attention_meetings.py", "tests/gpu/test_paged_prefill.py"),
            rows=("hopper",),
            ci="compiled for sm_90",
            compiled=("hopper",),
        ),
        Family(
            name="attention_mixed_hopper",
            sources=(
                *_PORTABLE,
                *_PAGED,
                *_HOPPER,
                *_HOPPER_DECODE,
                *_HOPPER_TILED,
                *(
                    _ATTENTION + name
                    for name in ("gluon_mixed.py", "rows/decode.py", "rows/hopper.py", "rows/mixed.py")
                ),
            ),
            tests=("tests/gpu/test_mixed.py",),
            rows=("hopper_mixed",),
            ci="compiled for sm_90",
            compiled=("hopper_mixed",),
        ),
        Family(
            name="attention_codes_hopper",
            sources=(*_PORTABLE, *_HOPPER, *_HOPPER_TILED, *_IN_FEW_BITS, *_HOPPER_CODES),
            tests=("tests/gpu/test_attention_quantize.py", "tests/gpu/test_attention_meetings.py"),
            rows=("hopper_codes",),
            ci="compiled for sm_90",
            compiled=("hopper_codes",),
        ),
        Family(
            name="attention_codes_triton",
            sources=(*_PORTABLE, *_IN_FEW_BITS, *_TRITON_CODES),
            tests=("tests/gpu/test_attention_quantize.py",),
            rows=("triton_codes",),
            ci=_CI,
            compiled=("triton_codes",),
        ),
        Family(
            name="attention_codes_cpu",
            sources=(
                *_FORMULA,
                *_SHARED,
                *_IN_FEW_BITS,
                _ATTENTION + "cpu*.py",
                _ATTENTION + "variant.py",
                _ATTENTION + "rows/cpu_codes.py",
            ),
            tests=("tests/ops/test_attention_quantize.py",),
            rows=("cpu_codes",),
        ),
        Family(
            name="attention_cpu",
            sources=(
                *_FORMULA,
                *_SHARED,
                *_CPU,
                _ATTENTION + "cpu_sdpa.py",
                _ATTENTION + "rows/cpu.py",
            ),
            tests=("tests/ops/*.py",),
            rows=("cpu_sdpa", "cpu_tiled"),
        ),
        Family(
            name="merge_triton",
            sources=(
                *_MERGE_SHARED,
                _MERGE + "triton_*.py",
                _LAUNCH,
                "src/tilewise/tiles/arithmetic.py",
            ),
            tests=("tests/gpu/test_merge.py", _FAR),
            rows=("triton",),
            ci=_CI,
            operation="merge",
            compiled=("merge",),
        ),
        Family(
            name="merge_cpu",
            sources=(*_MERGE_SHARED, _MERGE + "cpu.py"),
            tests=("tests/ops/merge/*.py",),
            rows=("cpu",),
            operation="merge",
        ),
        *_writes("kv_write", _WRITE_SHARED, tests=(_FAR,)),
        *_writes("qkv_prologue", _PROLOGUE_SHARED, beside=(_WRITE,), more="apart"),
        *itertools.chain.from_iterable(map(_neighbour, NEIGHBOURS)),
        Family(
            name="token_scores_hopper",
            sources=(
                *_neighbour("token_scores")[0].sources,
                "src/tilewise/ops/token_scores/gluon_*.py",
                "src/tilewise/tiles/gluon_api.py",
            ),
            tests=_neighbour("token_scores")[0].tests,
            rows=("hopper",),
            ci="compiled for sm_90",
            operation="token_scores",
            compiled=("token_scores",),
        ),
        _layer("layer_cuda", (*_PORTABLE, *_HOPPER, *_HOPPER_TILED), 0),
        _layer("layer_cpu", (*_FORMULA, *_SHARED, *_CPU, _ATTENTION + "cpu_sdpa.py"), 1),
        Family(name="tilemap", sources=_FORMULA, tests=("tests/schedule/*.py",), rows=()),
        Family(name="quant", sources=("src/tilewise/quant/*.py",), tests=("tests/quant/*.py",), rows=()),
        Family(name="kv", sources=("src/tilewise/kv/*.py",), tests=("tests/kv/*.py",), rows=()),
        Family(
            name="engine",
            sources=tuple(f"src/tilewise/{part}/*.py" for part in ("engine", "engine/models", "kv")),
            tests=("tests/gpu/test_engine*.py",),
            rows=(),
        ),
    )
}


def family_of(row: str, operation: str = "attention") -> Family | None:
    """The family that a row of an operation's dispatch table belongs to, by the row's name."""
    families = (family for family in FAMILIES.values() if family.operation == operation)
    return next((family for family in families if row in family.rows), None)
