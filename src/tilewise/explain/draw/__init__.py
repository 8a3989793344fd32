"""Pictures by matplotlib (the extra `tilewise[draw]`): each function returns a figure for `save`.

`mask`, `tiles` and `query` draw masks; `roofline`, `traffic`, `ladder` and `timeline` the cost of attention; `shares`
the tiles of each program; `pages` block tables; `errors`, `lengths`, `codes` and `steps` quantisation; `weights` the
weights of tiles and a selection; `engine_steps` the parts of an engine's steps over time. The same figure saved twice
gives the same bytes.
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
