"""Pictures through matplotlib (the extra `tilewise[draw]`), each a function that returns a figure for `save`.

`mask`, `tiles` and `query` draw masks; `roofline`, `traffic`, `ladder` and `timeline` draw what attention costs;
`shares` who does which tile, `pages` who holds which page; `errors`, `lengths`, `codes` and `steps` what few bits cost;
`weights` where weights lie and which tiles are taken; `engine_steps` when the parts of an engine's steps run. Files are
deterministic: the same figure saved twice gives the same bytes.
"""

from tilewise.explain.draw.bits import codes, errors, lengths, steps
from tilewise.explain.draw.engine import engine_steps
from tilewise.explain.draw.formulas import mask, panel
from tilewise.explain.draw.masks import EMPTY, FULL, PARTIAL, Panel, classify, query, tiles
from tilewise.explain.draw.pages import pages
from tilewise.explain.draw.plots import ladder, roofline, timeline, traffic
from tilewise.explain.draw.style import check_target, save
from tilewise.explain.draw.weights import weights
from tilewise.explain.draw.work import shares

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Panel",
    "check_target",
    "classify",
    "codes",
    "engine_steps",
    "errors",
    "ladder",
    "lengths",
    "mask",
    "pages",
    "panel",
    "query",
    "roofline",
    "save",
    "shares",
    "steps",
    "tiles",
    "timeline",
    "traffic",
    "weights",
]
