"""Steps of requests that all decode, as CUDA graphs: one for each number of requests, rounded up, so that the host
launches a step by a copy of its indices and one call.

On a CPU nothing is recorded: the same steps, with the same padding, run again each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewise.engine.forward import Forward, Plans, Tokens
from tilewise.engine.pages import Pages
from tilewise.engine.slot_params import Kind, SlotParams
from tilewise.layouts import Paged
from tilewise.ops.sampling import sample as choose

_FIRST = (Kind(greedy=True), Kind(greedy=False))  # recorded before the first request comes


def sizes(most: int) -> list[int]:
    """Numbers of requests that steps are padded to, up to `most`."""
    found = [size for size in (1, 2, 4, *range(8, most, 8)) if size < most]
    return [*found, most]


class DecodeGraphs:
    """Steps in which each request computes one token and samples the next.

    Args:
        forward: the model.
        pages: whose block tables have a row more than there are slots.
        tokens: int32 (slots + 1, length), of each slot; what padding samples goes to the last row.
        params: of the slots.
        most: requests of a step at most.
    """

    def __init__(self, forward: Forward, pages: Pages, tokens: torch.Tensor, params: SlotParams, most: int) -> None:
        self._forward, self._pages, self._tokens, self._params = forward, pages, tokens, params
        self._sizes = sizes(most)
        self._steps: dict[tuple[int, Kind | None], _Step] = {}
        self._pool: Any = None
        self.failed: str | None = None  # why there are fewer than there might be

    @property
    def recorded(self) -> list[int]:
        """Numbers of requests that there is a graph for."""
        return sorted({size for size, _ in self._steps})

    @property
    def largest(self) -> int:
        """Requests of a step that a graph can have."""
        return self._sizes[-1] if self._sizes else 0

    def record(self) -> None:
        """Record the usual steps, the largest first, whose memory the others share. Where memory ends, larger steps
        run without a graph.
        """
        for size in reversed(self._sizes.copy()):
            try:
                for kind in _FIRST:
                    self._step(size, kind)
            except torch.OutOfMemoryError as error:
                self._sizes.remove(size)
                self._steps = {key: step for key, step in self._steps.items() if key[0] != size}
                self.failed = f"no memory for {size} requests ({str(error).splitlines()[0]})"
                torch.cuda.empty_cache()

    def run(self, slots: torch.Tensor, starts: torch.Tensor, count: int, kind: Kind | None) -> torch.Tensor:
        """Compute a step.

        Args:
            slots: int32 (size,) on the device, of requests, then of padding (the last row of the block tables).
            starts: int32 (size,), tokens that each has in its pages.
            count: requests.
            kind: how tokens are chosen; None leaves that to the caller.

        Returns:
            Tokens int64 (count,), which have joined those of their slots, or logits (count, vocab_size). The next run
            overwrites them.
        """
        return self._step(len(slots), kind).run(slots, starts)[:count]

    def padded(self, count: int) -> int:
        """The size of a step of so many requests."""
        return next(size for size in self._sizes if size >= count)

    def _step(self, size: int, kind: Kind | None) -> _Step:
        step = self._steps.get((size, kind))
        if step is None:
            step = _Step(self._forward, self._pages, self._tokens, self._params, size, kind)
            self._pool = step.record(self._pool)
            self._steps[size, kind] = step
        return step


class _Step:
    """A step of one size and kind: tensors whose places stay, and what runs on them."""

    def __init__(
        self, forward: Forward, pages: Pages, tokens: torch.Tensor, params: SlotParams, size: int, kind: Kind | None
    ) -> None:
        self._forward, self._pages, self._tokens, self._params, self._kind = forward, pages, tokens, params, kind
        device = tokens.device
        self._padding = len(tokens) - 1
        self._inputs = torch.zeros(2, size, dtype=torch.int32, device=device)
        self._inputs[0] = self._padding
        self._tables = torch.zeros(len(pages.groups), size, pages.tables.shape[2], dtype=torch.int32, device=device)
        self._lengths = torch.zeros(size, dtype=torch.int32, device=device)
        self._cu = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._plans: Plans = {}
        self._replay: Callable[[], torch.Tensor] = self._compute

    def run(self, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """For requests in these slots."""
        self._inputs[0], self._inputs[1] = slots, starts
        return self._replay()

    def record(self, pool: Any) -> Any:
        """Record it on a GPU, with padding alone; returns the memory that graphs share."""
        device = self._inputs.device
        if device.type != "cuda":
            return None
        beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):  # compiles kernels, and makes plans and workspaces
            self._compute()
            self._compute()
        torch.cuda.current_stream(device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            found = self._compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return found

        self._replay = replay
        return graph.pool()

    @torch.no_grad()
    def _compute(self) -> torch.Tensor:
        slots, starts = self._inputs.unbind()
        real = slots < self._padding
        self._tables.copy_(self._pages.tables[:, slots])
        self._lengths.copy_(torch.where(real, starts + 1, 0))
        for each in self._plans.values():
            each.update()
        where = torch.where(real, self._forward.where(slots, starts), -1)
        layouts = [Paged(table, self._lengths, self._cu) for table in self._tables.unbind()]
        tokens = Tokens(self._tokens[slots, starts], starts, where, layouts)
        logits = self._forward.decoder.logits(self._forward.hidden(tokens, self._plans))
        if self._kind is None:
            return logits
        rows = slots.long()
        found = choose(logits, **self._params.plain(rows, self._lengths, self._kind))
        self._tokens[rows, self._lengths.long()] = found.tokens.clamp(min=0).int()
        return found.tokens
