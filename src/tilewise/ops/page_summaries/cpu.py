"""Summaries of pages in PyTorch, all pages at once."""

from __future__ import annotations

import torch

from tilewise.ops.page_summaries.problem import Call, touched

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills page, and what stands in the slots of pages; other slots hold 0."""
    for name, x in results.items():
        x.fill_(-1 if name == "page" else 0)
    found = list(touched(call))
    if not found:
        return
    slots, pages, counts = (torch.tensor(part) for part in zip(*found, strict=True))
    there = torch.arange(call.k.shape[1])[None, :, None, None] < counts[:, None, None, None]
    k, v = call.k[pages], call.v[pages]
    results["page"][slots] = pages.to(torch.int32)
    results["least"][slots] = k.masked_fill(~there, torch.inf).amin(1)
    results["largest"][slots] = k.masked_fill(~there, -torch.inf).amax(1)
    for name, x in (("k_mean", k), ("v_mean", v)):
        total = x.float().masked_fill(~there, 0.0).sum(1)
        results[name][slots] = (total / counts[:, None, None]).to(x.dtype)
    if call.bits:
        least, largest = (results[name][slots].float()[:, None] for name in ("least", "largest"))
        inv = (2**call.bits - 1) / (largest - least)
        codes = ((k.float() - least) * inv.where(largest > least, 0.0)).where(there, 0.0).round()
        codes = codes.clamp(0, 2**call.bits - 1).to(torch.uint8).permute(0, 2, 3, 1)
        if call.bits == 4:
            low, high = codes.chunk(2, -1)
            codes = low | high << 4
        results["columns"][slots] = codes
