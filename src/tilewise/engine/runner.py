"""What happens on the device in a step: tokens in, tokens out, and nothing that the host waits for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilewise.engine.config import EngineConfig
from tilewise.engine.models.decoder import Decoder, Norms
from tilewise.engine.pages import Growth, Pages
from tilewise.engine.request import Sample
from tilewise.engine.scheduler import Work
from tilewise.engine.slot_params import SlotParams
from tilewise.formula.library import causal, window
from tilewise.kv.transfer import send_lists
from tilewise.layouts import Paged
from tilewise.ops.attention import plan
from tilewise.ops.attention.planned import AttentionPlan
from tilewise.ops.qkv_prologue import QKVPrologue
from tilewise.ops.sampling import sample as choose
from tilewise.rotary import Rope

_ROWS = 256  # of a prompt whose log-probabilities are made at a time


class Given(NamedTuple):
    """What a step gives, on the host once the device is that far; one row for each sample that gets a token."""

    tokens: torch.Tensor  # int64 (rows,), -1 where logits are no numbers
    logprobs: torch.Tensor | None  # float32 (rows,)
    top_tokens: torch.Tensor | None  # int64 (rows, n)
    top_logprobs: torch.Tensor | None


class Prompted(NamedTuple):
    """Log-probabilities of tokens of a prompt, of one sample's part of a step."""

    tokens: torch.Tensor  # int64 (tokens,), those at the positions after the part's own
    logprobs: torch.Tensor  # float32 (tokens,)
    top_tokens: torch.Tensor  # int64 (tokens, n)
    top_logprobs: torch.Tensor


@dataclass(frozen=True)
class Step:
    """One that is under way: what it gives to the `work` that samples, in their order, and of prompts, by work."""

    work: list[Work]
    given: Given | None
    prompted: dict[int, Prompted]
    done: Any

    def wait(self) -> None:
        """Until the device is that far."""
        if self.done is not None:
            self.done.synchronize()


class Runner:
    """A decoder with what it needs on the device: tokens of each slot, block table, rotary tables.

    Tokens of a slot stay on the device, the sampled ones too: a step is told where to begin and how far to go.
    """

    def __init__(self, decoder: Decoder, pages: Pages, config: EngineConfig, max_length: int) -> None:
        self.decoder, self.pages = decoder, pages
        self._config, self._device = config, decoder.device
        self._tokens = torch.zeros(config.max_running, max_length + 1, dtype=torch.int32, device=self._device)
        self._params = SlotParams(
            config.max_running, decoder.config.vocab_size, self._tokens, decoder.config.eos_token_ids
        )
        self._cos, self._sin = decoder.rope_tables(max_length)
        self._masks = {each.window: causal if each.window is None else window(each.window) for each in pages.groups}
        self._places = {  # of a layer: its group, and its place among that group's
            layer: (number, place)
            for number, group in enumerate(pages.groups)
            for place, layer in enumerate(group.layers)
        }
        # on a CPU float32 is near enough: another order of sums changes no token
        self._invariant = decoder.invariant = config.deterministic and decoder.device.type == "cuda"

    def seat(self, samples: Sequence[Sample]) -> None:
        """Send samples' tokens and parameters to their slots."""
        counts = [len(sample.tokens) for sample in samples]
        tokens, of, at, slots = send_lists(
            [
                [token for sample in samples for token in sample.tokens],
                [sample.slot for sample, count in zip(samples, counts, strict=True) for _ in range(count)],
                [n for count in counts for n in range(count)],
                [sample.slot for sample in samples],
            ],
            self._device,
        )
        self._tokens[of.long(), at.long()] = tokens
        self._params.seat(samples, slots.long())

    @torch.no_grad()
    def launch(self, work: list[Work], growth: Growth) -> Step:
        """Start a step."""
        batch = self._sent(work, growth)
        rows = torch.repeat_interleave(batch.counts, output_size=batch.total)
        positions = batch.starts[rows] + torch.arange(batch.total, device=self._device) - batch.cu[rows]
        slots, lengths = batch.slots[rows], batch.starts + batch.counts
        size = self.pages.page_size
        where = self.pages.tables[:, slots, positions // size] * size + positions % size
        tables = self.pages.tables[:, batch.slots, : batch.width]
        layouts = [Paged(table, lengths, batch.cu) for table in tables.unbind()]
        rope = Rope(self._cos, self._sin, positions)

        eps = self.decoder.config.norm_eps
        prologues = [QKVPrologue(slots, rope=rope, eps=eps) for slots in where.unbind()]
        plans: dict[int, AttentionPlan] = {}  # by group: its layers attend over the same pages

        def attend(layer: int, qkv: torch.Tensor, norms: Norms) -> torch.Tensor:
            number, place = self._places[layer]
            sink = self.decoder.layers[layer].sink
            k, v = self.pages.pool.pages(place)
            q = prologues[number].run(qkv, k, v, q_norm=norms[0], k_norm=norms[1])
            if number not in plans:
                mask, layout = self._masks[self.pages.groups[number].window], layouts[number]
                plans[number] = plan(q, k, v, mask=mask, sink=sink, layout=layout, batch_invariant=self._invariant)
            return plans[number].run(q, k, v, sink=sink)

        hidden = self.decoder.hidden(self._tokens[slots, positions], attend)
        prompted = {n: self._prompted(each, hidden, batch, n) for n, each in enumerate(work) if _asks_of_prompt(each)}
        given = None if batch.ends is None else self._choose(work, hidden, batch, batch.ends)
        return self._received(work, given, prompted)

    def _choose(self, work: Sequence[Work], hidden: torch.Tensor, batch: _Batch, ends: torch.Tensor) -> Given:
        """The next token of each sample whose last token was computed; it joins the sample's others on the device."""
        sampled = [each for each in work if each.samples]
        samples = [each.sample for each in sampled]
        slots, lengths = batch.slots[ends].long(), batch.starts[ends] + batch.counts[ends]
        counts = [each.start + each.count - each.sample.prompt_length for each in sampled]
        arguments = self._params.of(samples, counts, slots, lengths)
        found = choose(self.decoder.logits(hidden[batch.cu[ends + 1] - 1]), **arguments)
        self._tokens[slots, lengths.long()] = found.tokens.clamp(min=0).int()  # the next step may have begun
        asked = arguments["logprobs"] is not None
        return Given(found.tokens, found.logprobs if asked else None, found.top_tokens, found.top_logprobs)

    def _prompted(self, each: Work, hidden: torch.Tensor, batch: _Batch, n: int) -> Prompted:
        """Log-probabilities of the prompt's tokens that come after those of a part."""
        first = sum(before.count for before in batch.work[:n])
        count = min(each.count, each.sample.prompt_length - 1 - each.start)
        wanted = self._tokens[each.slot, each.start + 1 : each.start + 1 + count].long()
        listed = each.sample.request.params.prompt_logprobs or 0
        parts = []
        for start in range(0, count, _ROWS):
            rows = hidden[first + start : first + min(start + _ROWS, count)]
            log = torch.log_softmax(self.decoder.logits(rows), -1)
            own = log.gather(1, wanted[start : start + _ROWS, None])[:, 0]
            parts.append((own, *log.topk(listed, -1)))
        own, values, tokens = (torch.cat(part) for part in zip(*parts, strict=True))
        return Prompted(wanted, own, tokens, values)

    def _sent(self, work: Sequence[Work], growth: Growth) -> _Batch:
        """Send what a step is about in one transfer, and bring the block table up to date."""
        slots = [each.slot for each in work]
        starts, counts = [each.start for each in work], [each.count for each in work]
        ends = [at for at, each in enumerate(work) if each.samples]
        cu = list(itertools.accumulate(counts, initial=0))
        parts = [cu, slots, starts, counts, ends, *map(list, zip(*growth.changes, strict=True))]
        parts += [[page for pair in growth.copies for page in pair]]
        on_device = send_lists(parts, self._device)
        if growth.changes:
            group, slot, index, page = on_device[5:9]
            self.pages.tables[group.long(), slot.long(), index.long()] = page
        if growth.copies:
            self.pages.pool.copy(on_device[-1].view(-1, 2))
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        width = -(-longest // self.pages.page_size)
        cu_, slots_, starts_, counts_, ends_ = on_device[:5]
        return _Batch(work, cu_, slots_, starts_, counts_, ends_ if ends else None, cu[-1], width)

    def _received(self, work: list[Work], given: Given | None, prompted: dict[int, Prompted]) -> Step:
        """A step whose results are on their way to the host."""
        if self._device.type != "cuda":
            return Step(work, given, prompted, None)
        if given is not None:
            tokens, *others = (None if x is None else x.to("cpu", non_blocking=True) for x in given)
            assert tokens is not None
            given = Given(tokens, *others)
        prompted = {n: Prompted(*(x.to("cpu", non_blocking=True) for x in each)) for n, each in prompted.items()}
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return Step(work, given, prompted, done)


def _asks_of_prompt(each: Work) -> bool:
    """Whether log-probabilities of the prompt are wanted that follow from this part of it."""
    sample = each.sample
    return (
        sample.request.params.prompt_logprobs is not None
        and sample.index == 0
        and each.start < sample.prompt_length - 1
    )


@dataclass(frozen=True)
class _Batch:
    """A step's entries, int32 on the device."""

    work: Sequence[Work]
    cu: torch.Tensor  # (entries + 1,)
    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor | None  # entries that sample
    total: int
    width: int  # pages of the longest
