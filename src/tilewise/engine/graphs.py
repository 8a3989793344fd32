"""Steps as CUDA graphs, so that the host launches one by a copy of its indices and one call: those in which all
requests decode, for some numbers of requests, and others, for some numbers of tokens. Steps are padded to the next.

On a CPU nothing is recorded: the same steps, with the same padding, run again each time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from tilewise.engine.config import LARGEST_GRAPH
from tilewise.engine.forward import Forward, Plans, Tokens
from tilewise.engine.pages import Pages
from tilewise.engine.slot_params import Kind, SlotParams
from tilewise.layouts import Paged
from tilewise.ops.sampling import sample as choose

_FIRST = (Kind(greedy=True), Kind(greedy=False))  # recorded before the first request comes
_FEWEST = 16  # tokens of a step that is padded to a number of tokens
_EVEN = 256  # from here on there are four numbers of tokens for each power of two
_PROMPTS = 256  # tokens of a step from which on it is likely to have prompts


def request_sizes(most: int) -> list[int]:
    """Numbers of requests that steps in which all decode are padded to, up to `most`."""
    return _up_to(most, (1, 2, 4, *range(8, most, 8)))


def token_sizes(most: int) -> list[int]:
    """Numbers of tokens that other steps are padded to, up to `most`."""
    found, size = [_FEWEST], _FEWEST
    while size < most:
        size += size if size < _EVEN else 2 ** (size.bit_length() - 3)
        found.append(size)
    return _up_to(most, found)


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    return [*(size for size in sizes if size < most), most]


class StepGraphs:
    """Steps of an engine, padded and recorded.

    Args:
        forward: the model.
        pages: whose block tables have a row more than there are slots.
        tokens: int32 (slots + 1, length), of each slot; what padding samples goes to the last row.
        params: of the slots.
        most_tokens: of a step.

    Attributes:
        failed: why there are fewer graphs than there might be.
    """

    def __init__(
        self, forward: Forward, pages: Pages, tokens: torch.Tensor, params: SlotParams, most_tokens: int
    ) -> None:
        self._forward, self._pages, self._tokens, self._params = forward, pages, tokens, params
        self._slots = len(tokens) - 1
        self._sizes = {
            True: request_sizes(min(self._slots, most_tokens, LARGEST_GRAPH)), False: token_sizes(most_tokens),
        }  # fmt: skip
        self._steps: dict[tuple[bool, int, Kind | None], _Step] = {}
        self._pool: Any = None
        self.failed: str | None = None

    @property
    def requests(self) -> list[int]:
        """Numbers of requests that there is a graph for, of steps in which all decode."""
        return self._recorded(decoding=True)

    @property
    def tokens(self) -> list[int]:
        """Numbers of tokens that there is a graph for, of other steps."""
        return self._recorded(decoding=False)

    def record(self) -> None:
        """Record the usual steps, the largest first, whose memory the others share. Where memory ends, larger steps
        run without a graph.
        """
        for decoding, what in ((False, "tokens"), (True, "requests")):
            for size in reversed(self._sizes[decoding].copy()):
                try:
                    for kind in _FIRST if decoding else (None,):
                        self._step(decoding, size, kind)
                except torch.OutOfMemoryError as error:
                    self._sizes[decoding].remove(size)
                    self._steps = {key: step for key, step in self._steps.items() if key[:2] != (decoding, size)}
                    self.failed = f"no memory for {size} {what} ({str(error).splitlines()[0]})"
                    torch.cuda.empty_cache()

    def padded(self, count: int, *, decoding: bool) -> int | None:
        """The size of a step of so many requests, or else of so many tokens; None where it has no graph."""
        return next((size for size in self._sizes[decoding] if size >= count), None)

    def rows(self, size: int) -> int:
        """Sequences of a step of so many tokens: of requests, and of what pads it."""
        return min(size, self._slots) + 1

    def decode(self, slots: torch.Tensor, starts: torch.Tensor, count: int, kind: Kind | None) -> torch.Tensor:
        """Compute a step in which each request computes one token and samples the next.

        Args:
            slots: int32 (size,) on the device, of requests, then of padding (the last row of the block tables).
            starts: int32 (size,), tokens that each has in its pages.
            count: requests.
            kind: how tokens are chosen; None leaves that to the caller.

        Returns:
            Tokens int64 (count,), which have joined those of their slots, or logits (count, vocab_size). The next run
            overwrites them.
        """
        return self._step(True, len(slots), kind).run(slots, starts)[:count]

    def hidden(self, size: int, slots: torch.Tensor, starts: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        """Compute a step up to the model's last norm.

        Args:
            size: tokens, with those of padding.
            slots: int32 (rows,) on the device, `rows(size)` of them, of requests, then of padding.
            starts: int32 (rows,), tokens that each has in its pages.
            cu: int32 (rows + 1,), cumulative new tokens. The first row of padding has all that `size` leaves.

        Returns:
            (size, hidden_size). The next run overwrites it.
        """
        return self._step(False, size, None).run(slots, starts, cu)

    def _recorded(self, *, decoding: bool) -> list[int]:
        return sorted({size for kind, size, _ in self._steps if kind == decoding})

    def _step(self, decoding: bool, size: int, kind: Kind | None) -> _Step:
        key = decoding, size, kind
        step = self._steps.get(key)
        if step is None:
            compute: _Compute
            if decoding:
                compute = _Decode(self._forward, self._pages, self._tokens, self._params, size, kind)
            else:
                compute = _Hidden(self._forward, self._pages, self._tokens, size, self.rows(size))
            step = _Step(compute)
            self._pool = step.record(self._pool)
            self._steps[key] = step
        return step


class _Compute(Protocol):
    """What a step runs, on tensors whose places stay."""

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]: ...

    def __call__(self) -> torch.Tensor: ...


class _Step:
    """A step of one size and kind."""

    def __init__(self, compute: _Compute) -> None:
        self._compute = compute
        self._replay: Callable[[], torch.Tensor] = compute

    @torch.no_grad()
    def run(self, *given: torch.Tensor) -> torch.Tensor:
        """With these inputs."""
        for into, x in zip(self._compute.inputs, given, strict=True):
            into.copy_(x)
        return self._replay()

    @torch.no_grad()
    def record(self, pool: Any) -> Any:
        """Record it on a GPU, with padding alone; returns the memory that graphs share."""
        device = self._compute.inputs[0].device
        if device.type != "cuda":
            return None
        beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):  # compiles kernels, and makes plans and workspaces
            self._compute()
            self._compute()
        torch.cuda.current_stream(device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=pool):
            found = self._compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return found

        self._replay = replay
        return graph.pool()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: where it frees another engine's graph, the one that is being recorded is lost."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _Rows:
    """Pages and lengths of some rows, each a request or padding, in tensors whose places stay."""

    def __init__(self, forward: Forward, pages: Pages, rows: int, padding: int, cu: torch.Tensor) -> None:
        device = pages.tables.device
        self._forward, self._pages, self._padding = forward, pages, padding
        self._tables = torch.zeros(len(pages.groups), rows, pages.tables.shape[2], dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self._layouts = [Paged(table, self.lengths, cu) for table in self._tables.unbind()]
        self._plans: Plans = {}

    def hidden(
        self, ids: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, of: torch.Tensor, positions: torch.Tensor,
        *, prompts: bool | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """What the last norm gives.

        Args:
            ids: of the tokens.
            slots: of the rows, the last row of the block tables for padding.
            ends: tokens that each row has afterwards.
            of: the slot of each token.
            positions: of the tokens.
            prompts: whether some rows have many tokens, as `Forward.hidden` takes it.
        """
        self._tables.copy_(self._pages.tables[:, slots])
        self.lengths.copy_(torch.where(slots < self._padding, ends, 0))  # no key for padding
        for each in self._plans.values():
            each.update()
        where = torch.where(of < self._padding, self._forward.where(of, positions), -1)
        return self._forward.hidden(Tokens(ids, positions, where, self._layouts), self._plans, prompts=prompts)


class _Decode:
    """A step in which each request computes one token and samples the next."""

    def __init__(
        self, forward: Forward, pages: Pages, tokens: torch.Tensor, params: SlotParams, size: int, kind: Kind | None
    ) -> None:
        self._decoder, self._tokens, self._params, self._kind = forward.decoder, tokens, params, kind
        padding, device = len(tokens) - 1, tokens.device
        slots = torch.full((size,), padding, dtype=torch.int32, device=device)
        self.inputs = (slots, torch.zeros_like(slots))
        cu = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._rows = _Rows(forward, pages, size, padding, cu)

    def __call__(self) -> torch.Tensor:
        slots, starts = self.inputs
        hidden = self._rows.hidden(self._tokens[slots, starts], slots, starts + 1, slots, starts)
        logits = self._decoder.logits(hidden)
        if self._kind is None:
            return logits
        rows, lengths = slots.long(), self._rows.lengths
        found = choose(logits, **self._params.plain(rows, lengths, self._kind))
        self._tokens[rows, lengths.long()] = found.tokens.clamp(min=0).int()
        return found.tokens


class _Hidden:
    """A step of any requests, up to the last norm."""

    def __init__(self, forward: Forward, pages: Pages, tokens: torch.Tensor, size: int, rows: int) -> None:
        self._tokens, padding, device = tokens, len(tokens) - 1, tokens.device
        self._padding = padding
        slots = torch.full((rows,), padding, dtype=torch.int32, device=device)
        cu = torch.full((rows + 1,), size, dtype=torch.int32, device=device)
        cu[0] = 0
        self.inputs = (slots, torch.zeros_like(slots), cu)
        self._places = torch.arange(size, dtype=torch.int32, device=device)
        self._rows = _Rows(forward, pages, rows, padding, cu)

    def __call__(self) -> torch.Tensor:
        slots, starts, cu = self.inputs
        row = torch.searchsorted(cu[1:], self._places, right=True)
        of = slots[row]
        positions = torch.where(of < self._padding, starts[row] + self._places - cu[row], 0)
        ids, prompts = self._tokens[of, positions], len(self._places) >= _PROMPTS
        return self._rows.hidden(ids, slots, starts + cu.diff(), of, positions, prompts=prompts)
