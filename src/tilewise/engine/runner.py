"""What happens on the device in a step: tokens in, tokens out, and nothing that the host waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.engine.config import EngineConfig
from tilewise.engine.models.decoder import Decoder
from tilewise.engine.pages import Growth, Pages
from tilewise.engine.request import Sample
from tilewise.engine.scheduler import Work
from tilewise.formula.library import causal, window
from tilewise.layouts import Paged
from tilewise.ops.attention import attention
from tilewise.ops.kv_write import kv_write
from tilewise.ops.rope import rope as rotate
from tilewise.rotary import Rope


@dataclass(frozen=True)
class Step:
    """One that is under way: `work` of which the ones that sample get `tokens`, in their order."""

    work: list[Work]
    tokens: torch.Tensor | None  # int64, on the host once `done`
    done: Any

    def read(self) -> list[int]:
        """The tokens, once the device has them."""
        if self.tokens is None:
            return []
        if self.done is not None:
            self.done.synchronize()
        return [int(token) for token in self.tokens.tolist()]


class Runner:
    """A decoder with what it needs on the device: tokens of each slot, block table, rotary tables.

    Tokens of a slot stay on the device, the sampled ones too: a step is told where to begin and how far to go.
    """

    def __init__(self, decoder: Decoder, pages: Pages, config: EngineConfig, max_length: int) -> None:
        self.decoder, self.pages = decoder, pages
        self._config, self._device = config, decoder.device
        self._tokens = torch.zeros(config.max_running, max_length + 1, dtype=torch.int32, device=self._device)
        self._cos, self._sin = decoder.rope_tables(max_length)
        windows = set(decoder.config.windows)
        self._masks = {size: causal if size is None else window(size) for size in windows}

    def seat(self, sample: Sample) -> None:
        """Send a sample's tokens to its slot."""
        row = torch.tensor(sample.tokens, dtype=torch.int32)
        self._tokens[sample.slot, : len(sample.tokens)] = row.to(self._device, non_blocking=True)

    @torch.no_grad()
    def launch(self, work: list[Work], growth: Growth) -> Step:
        """Start a step."""
        batch = self._sent(work, growth)
        rows = torch.repeat_interleave(batch.counts, output_size=batch.total)
        positions = batch.starts[rows] + torch.arange(batch.total, device=self._device) - batch.cu[rows]
        slots = batch.slots[rows]
        size = self.pages.page_size
        where = self.pages.table[slots, positions // size] * size + positions % size
        layout = Paged(self.pages.table[batch.slots, : batch.width], batch.starts + batch.counts, batch.cu)
        rope = Rope(self._cos, self._sin, positions)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_pages, v_pages = self.pages.pool.pages(layer)
            kv_write(k, v, k_pages, v_pages, where, rope=rope)
            mask = self._masks[self.decoder.config.windows[layer]]
            q = rotate(q, rope=rope)
            o: torch.Tensor = attention(q, k_pages, v_pages, mask=mask, layout=layout)
            return o

        hidden = self.decoder.hidden(self._tokens[slots, positions], attend)
        if batch.ends is None:
            return Step(work, None, None)
        logits = self.decoder.logits(hidden[batch.cu[batch.ends + 1] - 1])
        chosen = logits.argmax(-1)
        at = batch.ends
        self._tokens[batch.slots[at], batch.starts[at] + batch.counts[at]] = chosen.int()
        return Step(work, *self._received(chosen))

    def _sent(self, work: Sequence[Work], growth: Growth) -> _Batch:
        """Send what a step is about in one transfer, and bring the block table up to date."""
        slots = [each.slot for each in work]
        starts, counts = [each.start for each in work], [each.count for each in work]
        ends = [at for at, each in enumerate(work) if each.samples]
        cu = [0]
        for count in counts:
            cu.append(cu[-1] + count)
        parts = [cu, slots, starts, counts, ends, *map(list, zip(*growth.changes, strict=True))]
        parts += [[page for pair in growth.copies for page in pair]]
        values: list[int] = []
        places = []
        for part in parts:
            places.append(slice(len(values), len(values) + len(part)))
            values += part + [0] * (-len(part) % 4)  # 16 bytes, as kernels like pointers
        host = torch.tensor(values, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        sent = host.to(self._device, non_blocking=True)
        on_device = [sent[place] for place in places]
        if growth.changes:
            slot, index, page = on_device[5:8]
            self.pages.table[slot.long(), index.long()] = page
        if growth.copies:
            self.pages.pool.copy(on_device[-1].view(-1, 2))
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        width = -(-longest // self.pages.page_size)
        return _Batch(*on_device[:4], on_device[4] if ends else None, cu[-1], width)

    def _received(self, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tokens on their way to the host, and what says when they are there."""
        if self._device.type != "cuda":
            return tokens, None
        host = tokens.to("cpu", non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return host, done


@dataclass(frozen=True)
class _Batch:
    """A step's entries, int32 on the device."""

    cu: torch.Tensor  # (entries + 1,)
    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor | None  # entries that sample
    total: int
    width: int  # pages of the longest
