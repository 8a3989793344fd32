"""Every kind of case, and which a name has."""

from __future__ import annotations

from collections.abc import Callable

from tools.fuzz import adapters, attention, caches, compiled, fused, infinite, models, pages, selected_pages, tiles
from tools.fuzz.case import Case
from tools.fuzz.draw import Draw, Name

KINDS: dict[str, tuple[int, Callable[[Draw], Case]]] = {
    "dense": (6, attention.dense),
    "packed": (6, attention.packed),
    "paged": (6, attention.paged),
    "shared": (2, attention.shared),
    "codes": (3, attention.codes),
    "codes_gradients": (1, attention.codes_gradients),
    "infinite": (2, infinite.infinite),
    "selected": (3, attention.selected),
    "selected_pages": (2, selected_pages.selected_pages),
    "selected_tokens": (1, selected_pages.selected_tokens),
    "compiled": (1, compiled.attention),
    "compiled_layers": (1, compiled.layers),
    "encoded": (2, pages.encoded),
    "channels": (2, pages.channels),
    "planned": (2, pages.planned),
    "kv_write": (2, pages.write),
    "copy_pages": (1, pages.copy),
    "kv_cache": (2, caches.kv_cache),
    "norm": (2, fused.norm),
    "softmax": (2, fused.softmax),
    "glu": (1, fused.glu),
    "rope": (2, fused.rope),
    "cross_entropy": (1, fused.cross_entropy),
    "linear_cross_entropy": (1, fused.linear_cross_entropy),
    "merge": (2, fused.merge),
    "sdpa": (2, adapters.torch_sdpa),
    "flash": (2, adapters.flash),
    "flash_cache": (2, adapters.flash_cache),
    "flex": (2, adapters.torch_flex),
    "flashinfer_ragged": (1, adapters.infer_ragged),
    "flashinfer_paged": (1, adapters.infer_paged),
    "sage": (1, adapters.sage),
    "transformers": (2, models.transformers),
    "sliding_tiles": (1, tiles.sliding_tiles),
    "video_blocks": (1, tiles.video_blocks),
    "sparge": (1, tiles.sparge),
}  # how often it is drawn, and who builds it


def kind_of(draw: Draw) -> str:
    """The kind that the name has: the first choice that neighbours share."""
    return draw.structure.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]


def builder(name: Name, device: str, small: bool = False) -> tuple[str, Callable[[], Case]]:
    """The kind of the case of this name, and what builds it."""
    draw = Draw(name, device, small)
    kind = kind_of(draw)
    return kind, lambda: KINDS[kind][1](draw)
