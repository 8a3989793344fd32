"""The matrix of tests: which implementation runs which case, and which property on which cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES
from tilewise.testing.properties import Setting, can_run

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Check = Callable[[Setting, Case], None]


def runnable(
    impls: Iterable[str], cases: Iterable[Case], dtypes: Iterable[torch.dtype] = DTYPES, device: str = "cpu"
) -> list[tuple[Setting, Case]]:
    """Every (setting, case) that the dispatch table allows, sorted by case so that neighbours share an oracle."""
    settings = [Setting(impl, dtype, device) for dtype in dtypes for impl in impls]
    return [(setting, case) for case in cases for setting in settings if can_run(setting, case)]


@dataclass(frozen=True)
class Applies:
    """The cases that a property is checked on, and what else an implementation must be able to do for it."""

    cases: tuple[str, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)


PROPERTIES: dict[Check, Applies] = {
    properties.memory_does_not_matter: Applies(("causal", "gqa_4", "alibi_causal", "packed_causal", "head_dim_64")),
    properties.repeats_are_equal: Applies(
        ("causal", "mqa", "alibi_causal", "bias_batch", "packed_window_sink", "dropout_causal"), {"deterministic": True}
    ),
    properties.hidden_keys_do_not_matter: Applies(("padding", "window_two_sided", "tail_window")),
    properties.batch_elements_are_independent: Applies(
        ("plain", "causal", "padding", "sink_causal", "alibi_causal", "gqa_4")
    ),
    properties.nan_and_inf_propagate: Applies(("causal", "plain", "softcap_causal", "sink_causal")),
    properties.nan_reaches_gradients: Applies(("plain", "softcap", "lse_gradient", "gqa_8", "plain_more_queries")),
    properties.keys_may_be_permuted: Applies(
        ("plain", "gqa_8", "softcap", "sink", "lse_gradient", "plain_more_queries")
    ),
    properties.groups_equal_expanded_heads: Applies(("gqa_2", "gqa_4", "gqa_8", "mqa", "sink_causal", "packed_causal")),
    properties.packed_equals_padded: Applies(("packed", "packed_causal", "packed_segments")),
    properties.last_queries_stand_at_the_last_keys: Applies(
        ("causal", "window", "alibi_causal", "document", "causal_more_keys"), {}, {"seqlen_q": 5}
    ),
    properties.parts_merge_by_lse: Applies(("plain", "head_dim_64", "gqa_8")),
    properties.a_constant_moves_only_lse: Applies(
        ("plain", "causal", "window_empty_rows", "gqa_2"), {"score": lambda s, b, h, i, j: s + 1.0}
    ),
    properties.dropout_follows_its_seed: Applies(("plain", "causal"), {"dropout": 0.5, "seed": 1}),
}
EXTRA = {
    "tail_window": CASES["window_two_sided"].with_(name="tail_window", seqlen_q=8, batch=3),
    "softcap": CASES["softcap_causal"].with_(name="softcap", mask=None),
    "sink": CASES["sink_causal"].with_(name="sink", mask=None),
}


def property_matrix(
    impls: Iterable[str], dtypes: Iterable[torch.dtype], device: str = "cpu"
) -> list[tuple[Check, Setting, Case]]:
    """Every (property, setting, case) that the dispatch table allows."""
    found: list[tuple[Check, Setting, Case]] = []
    impls, dtypes = list(impls), list(dtypes)
    for check, applies in PROPERTIES.items():
        cases = [CASES.get(name) or EXTRA[name] for name in applies.cases]
        for setting, case in runnable(impls, cases, dtypes, device):
            if can_run(setting, case.with_(**applies.changes), **applies.arguments):
                found.append((check, setting, case))
    return found


def name_of(value: Any) -> str:
    """A test's id: `causal`, `cpu_tiled-float32`, `repeats_are_equal`."""
    return str(value.__name__) if callable(value) else repr(value)
