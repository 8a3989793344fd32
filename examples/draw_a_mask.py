"""Draw masks: visible pairs, the class of each tile, and the tiles that one query visits.

Run: python examples/draw_a_mask.py [FOLDER]      (needs the extra tilewise[draw]; default: a new temporary folder)
"""

import sys
import tempfile
from pathlib import Path

import torch

import tilewise as tw
from tilewise.explain import draw

SEQLEN, BLOCK = 64, 8


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="tilewise_"))
    folder.mkdir(parents=True, exist_ok=True)
    ids = torch.tensor([0] * 20 + [1] * 12 + [2] * 32)
    masks = {
        "causal & document": tw.causal & tw.document(ids),
        "causal & (window | prefix)": tw.causal & (tw.window(16) | tw.prefix(torch.tensor([4]))),
        "every second key of a window": tw.window(32) & tw.dilated(2),
    }
    sizes = {"seqlen_q": SEQLEN, "seqlen_k": SEQLEN, "block_m": BLOCK, "block_n": BLOCK}
    panels = [draw.panel(mask, **sizes, title=title) for title, mask in masks.items()]
    for panel in panels:
        visited = int((panel.classes != draw.EMPTY).sum())
        print(f"{panel.title}: {visited} of {panel.classes.size} tiles are visited")

    figures = {"masks.svg": draw.tiles(panels, BLOCK, BLOCK), "query.svg": draw.query(panels[1], BLOCK, BLOCK, 45)}
    for name, figure in figures.items():
        print("wrote", draw.save(figure, folder / name))


if __name__ == "__main__":
    main()
