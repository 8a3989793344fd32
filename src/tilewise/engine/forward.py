"""The model over pages: from tokens of some requests to what its last norm gives, without a wait of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from tilewise.core.errors import UnsupportedError
from tilewise.engine.models.decoder import Decoder, Norms
from tilewise.engine.pages import Pages
from tilewise.formula.library import causal, window
from tilewise.layouts import Paged
from tilewise.ops.attention import MaskLike, plan
from tilewise.ops.attention.planned import AttentionPlan
from tilewise.ops.qkv_prologue import QKVPrologue
from tilewise.rotary import Rope

_BOTH = "hopper_mixed"  # attention that has a kernel for requests of many queries and one for others
Plans = dict[int, AttentionPlan]  # by group: its layers attend over the same pages


class Tokens(NamedTuple):
    """The tokens of a step, those of one request after another, int32 on the device."""

    ids: torch.Tensor  # (tokens,)
    positions: torch.Tensor  # (tokens,)
    where: torch.Tensor  # (groups, tokens): the KV slot that each is written to, negative for none
    layouts: list[Paged]  # of each group: pages of the requests, and their lengths with these tokens


class Forward:
    """A decoder over pages.

    Args:
        decoder: the model.
        pages: keys and values, and which layers belong together.
        max_length: positions that there are.
        invariant: whether attention has the same bits whatever the batch.
    """

    def __init__(self, decoder: Decoder, pages: Pages, max_length: int, *, invariant: bool) -> None:
        self.decoder, self._pages, self._invariant = decoder, pages, invariant
        self._cos, self._sin = decoder.rope_tables(max_length)
        self._masks = {each.window: causal if each.window is None else window(each.window) for each in pages.groups}
        self._places = {  # of a layer: its group, and its place among that group's
            layer: (number, place)
            for number, group in enumerate(pages.groups)
            for place, layer in enumerate(group.layers)
        }

    def where(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(groups, tokens): KV slots of the positions of requests in these slots of the engine."""
        size = self._pages.page_size
        return self._pages.tables[:, slots, positions // size] * size + positions % size

    def hidden(
        self, tokens: Tokens, plans: Plans | None = None, *, prompts: bool | None = None, mask: MaskLike = None
    ) -> torch.Tensor:
        """Write keys and values of tokens, and give what follows from them.

        Args:
            tokens: of the step.
            plans: of an earlier call with the same tensors, brought up to date; missing ones are made and added.
            prompts: True where some requests have many tokens and others one, whatever the mean; None where the mean
                tells.
            mask: what tokens see, in place of all before them; None is that.

        Returns:
            (tokens, hidden_size).
        """
        plans = {} if plans is None else plans
        rope, eps = Rope(self._cos, self._sin, tokens.positions), self.decoder.config.norm_eps
        prologues = [QKVPrologue(slots, rope=rope, eps=eps) for slots in tokens.where.unbind()]

        def attend(layer: int, qkv: torch.Tensor, norms: Norms) -> torch.Tensor:
            number, place = self._places[layer]
            sink = self.decoder.layers[layer].sink
            k, v = self._pages.pool.pages(place)
            q = prologues[number].run(qkv, k, v, q_norm=norms[0], k_norm=norms[1])
            if number not in plans:
                own, layout = mask or self._masks[self._pages.groups[number].window], tokens.layouts[number]
                made = partial(plan, q, k, v, mask=own, sink=sink, layout=layout, batch_invariant=self._invariant)
                plans[number] = _first_able(made, (_BOTH, None) if prompts else (None,))
            return plans[number].run(q, k, v, sink=sink)

        return self.decoder.hidden(tokens.ids, attend)


def _first_able(made: Callable[..., AttentionPlan], names: Sequence[str | None]) -> AttentionPlan:
    """The plan by the first of these implementations that can run it; the last may raise."""
    for name in names[:-1]:
        with suppress(UnsupportedError):
            return made(impl=name)
    return made(impl=names[-1])
