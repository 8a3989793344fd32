"""What `why` prints: the implementations that decide a call, and a count of the others."""

from __future__ import annotations

import torch

import tilewise as tw
from tilewise.ops.attention.table import ROWS

QKV = (torch.empty(2, 6, 4, 8), torch.empty(2, 9, 2, 8), torch.empty(2, 9, 2, 8))


def test_why_lists_what_decides_and_counts_the_rest() -> None:
    def names(found: tw.Explanation) -> list[str]:
        return [name for name, _, _ in found.shown()]

    chosen = tw.why(*QKV, mask=tw.causal)
    assert names(chosen) == ["cpu_sdpa", "cpu_tiled", "reference"]
    on_gpus = sum(row.name.startswith(("triton", "hopper")) for row in ROWS)
    assert chosen.rest() == f"{on_gpus} need a CUDA GPU and {len(ROWS) - 3 - on_gpus} cannot run this call"
    assert str(chosen).splitlines()[-1].split("(")[0].strip() == f"not listed: {chosen.rest()}"
    assert names(tw.why(*QKV, quantize=tw.Sage2())) == ["cpu_codes", "reference_codes"]
    refused = tw.why(*QKV, quantize=tw.Sage2(), dropout=0.1)
    assert (refused.chosen, names(refused)) == (None, ["cpu_codes", "reference_codes"])
    forced = tw.why(*QKV, mask=tw.causal, impl="hopper")
    assert names(forced) == ["cpu_tiled", "hopper", "reference"]
    assert "needs a Hopper GPU" in str(forced)
    whole = tw.why(*QKV, all=True)
    assert (len(whole.shown()), whole.rest()) == (len(ROWS), None)
