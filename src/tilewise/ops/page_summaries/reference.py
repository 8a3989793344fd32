"""The specification, one page after another, in float64."""

from __future__ import annotations

import torch

from tilewise.ops.page_summaries.problem import Call, touched

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills page, and what stands in the slots of pages; other slots hold 0."""
    for name, x in results.items():
        x.fill_(-1 if name == "page" else 0)
    for slot, page, count in touched(call):
        k, v = (x[page, :count].double() for x in (call.k, call.v))
        results["page"][slot] = page
        results["least"][slot], results["largest"][slot] = k.amin(0), k.amax(0)
        results["k_mean"][slot], results["v_mean"][slot] = k.mean(0), v.mean(0)
        if call.bits:
            least, largest = (results[name][slot].double() for name in ("least", "largest"))
            scale = (largest - least) / (2**call.bits - 1)
            codes = torch.round((k - least) / scale.where(scale > 0, 1.0)).to(torch.uint8)
            for token in range(count):
                place, high = token % results["columns"].shape[-1], token // results["columns"].shape[-1]
                results["columns"][slot, :, :, place] |= codes[token] << (4 * high)
