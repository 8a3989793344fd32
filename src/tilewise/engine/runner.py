"""What happens on the device in a step: tokens in, tokens out, and nothing that the host waits for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilewise.engine.config import EngineConfig
from tilewise.engine.decoding.tree_step import Planted, PlantedBatch, is_chain, visible
from tilewise.engine.decoding.verify import Verified, walk
from tilewise.engine.forward import Forward, Tokens
from tilewise.engine.graphs import StepGraphs
from tilewise.engine.models.decoder import Decoder
from tilewise.engine.pages import Growth, Pages
from tilewise.engine.request import Logprob, Sample
from tilewise.engine.scheduler import Work
from tilewise.engine.slot_params import SlotParams
from tilewise.kv.transfer import send, send_lists
from tilewise.layouts import Paged
from tilewise.ops.sampling import sample as choose

_ROWS = 256  # of a prompt whose log-probabilities are made at a time


class Given(NamedTuple):
    """What a step gives, on the host once the device is that far; one row for each sample that gets a token, and for
    each node of its tree where there is one.
    """

    tokens: torch.Tensor  # int64 (rows,), -1 where logits are no numbers
    logprobs: torch.Tensor | None  # float32 (rows,)
    top_tokens: torch.Tensor | None  # int64 (rows, n)
    top_logprobs: torch.Tensor | None
    nodes: torch.Tensor | None = None  # int64 (trees, depths): the root and accepted nodes of trees, -1 after them

    def logprob(self, row: int, token: int, count: int) -> Logprob:
        """What a row says about its token, beside the `count` most likely ones."""
        assert self.logprobs is not None
        assert self.top_tokens is not None
        assert self.top_logprobs is not None
        tokens, values = self.top_tokens[row, :count].tolist(), self.top_logprobs[row, :count].tolist()
        return Logprob(token, float(self.logprobs[row]), dict(zip(tokens, values, strict=True)))


class Prompted(NamedTuple):
    """Log-probabilities of tokens of a prompt, of one sample's part of a step."""

    tokens: torch.Tensor  # int64 (tokens,), those at the positions after the part's own
    logprobs: torch.Tensor  # float32 (tokens,)
    top_tokens: torch.Tensor  # int64 (tokens, n)
    top_logprobs: torch.Tensor

    def listed(self) -> list[Logprob]:
        """The same as objects."""
        rows = zip(*(x.tolist() for x in self), strict=True)
        return [Logprob(token, own, dict(zip(top, values, strict=True))) for token, own, top, values in rows]


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
    """A decoder with what it needs on the device: tokens and parameters of each slot, the model over pages, graphs.

    Tokens of a slot stay on the device, the sampled ones too: a step is told where to begin and how far to go.

    Args:
        decoder: the model.
        pages: its keys and values.
        config: sizes and choices.
        max_length: tokens of a sequence at most.
        beside: a runner of another model, whose tokens and parameters this one reads and writes: a draft's target.
    """

    def __init__(
        self, decoder: Decoder, pages: Pages, config: EngineConfig, max_length: int, *, beside: Runner | None = None
    ) -> None:
        self.decoder, self.pages = decoder, pages
        self._config, self._device = config, decoder.device
        rows = pages.tables.shape[1]  # with graphs, the last one is that of requests that pad a step
        if beside is None:
            self._tokens = torch.zeros(rows, max_length + 1, dtype=torch.int32, device=self._device)
            self._params = SlotParams(rows, decoder.config.vocab_size, self._tokens, decoder.config.eos_token_ids)
        else:
            self._tokens, self._params = beside._tokens, beside._params
        # on a CPU float32 is near enough: another order of sums changes no token
        decoder.invariant = config.deterministic and decoder.device.type == "cuda"
        self._forward = Forward(decoder, pages, max_length, invariant=decoder.invariant)
        self.graphs: StepGraphs | None = None
        if config.graphs_on(self._device):
            self.graphs = StepGraphs(self._forward, pages, self._tokens, self._params, config.max_batch_tokens)
            if self._device.type == "cuda":
                self.graphs.record()

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
        decoding = all(each.count == 1 and each.samples and each.tree is None for each in work)
        if decoding and self.graphs is not None:
            size = self.graphs.padded(len(work), decoding=True)
            if size is not None:
                return self._decode(work, growth, self.graphs, size)
        batch, hidden = self._hidden(work, growth)
        prompted = {n: self._prompted(each, hidden, batch, n) for n, each in enumerate(work) if _asks_of_prompt(each)}
        given = None if batch.picks is None else self._choose(hidden, batch, batch.picks)
        return self._received(work, given, prompted)

    def _hidden(self, work: list[Work], growth: Growth) -> tuple[_Batch, torch.Tensor]:
        """(what a step is about, what the model's last norm gives for its tokens and perhaps some more)"""
        size = None
        if self.graphs is not None:
            size = self.graphs.padded(sum(each.count for each in work), decoding=False)
        if self.graphs is not None and size is not None and not _branching(work):
            batch = self._sent(work, growth, rows=self.graphs.rows(size), total=size)
            return batch, self.graphs.hidden(size, batch.slots, batch.starts, batch.cu)
        batch = self._sent(work, growth)
        rows = torch.repeat_interleave(batch.counts, output_size=batch.total)
        places = batch.starts[rows] + torch.arange(batch.total, device=self._device) - batch.cu[rows]
        slots, lengths = batch.slots[rows], batch.starts + batch.counts
        tables = self.pages.tables[:, batch.slots, : batch.width]
        layouts = [Paged(table, lengths, batch.cu) for table in tables.unbind()]
        ids, where, positions, mask = self._tokens[slots, places], self._forward.where(slots, places), places, None
        if batch.trees is not None and _branching(work):  # a node's position is not its place
            nodes = batch.trees.rows.long()
            ids, positions = (
                x.index_copy(0, nodes, of.int())
                for x, of in ((ids, batch.trees.batch.tokens), (places.int(), batch.trees.batch.positions))
            )
            mask = visible(batch.trees.trees, len(work), self._device)
        return batch, self._forward.hidden(Tokens(ids, positions, where, layouts), mask=mask)

    def _decode(self, work: list[Work], growth: Growth, graphs: StepGraphs, size: int) -> Step:
        """Start a step in which all decode."""
        count, samples = len(work), [each.sample for each in work]
        padding = size - count
        slots = [each.slot for each in work] + [len(self._tokens) - 1] * padding
        starts = [each.start for each in work] + [0] * padding
        slots_, starts_ = self._sent_with([slots, starts], growth)
        counts = [each.start + 1 - each.sample.prompt_length for each in work]
        kind = self._params.kind(samples, counts)
        found = graphs.decode(slots_, starts_, count, kind)
        if kind is not None:
            return self._received(work, Given(found, None, None, None), {})
        rows, lengths = slots_[:count].long(), starts_[:count] + 1
        return self._received(work, self._given(found, samples, counts, rows, lengths), {})

    def _choose(self, hidden: torch.Tensor, batch: _Batch, picks: _Picks) -> Given:
        """The next token of each sample whose last token was computed, and what follows nodes of trees; tokens join the
        sample's others on the device.
        """
        logits, trees = self.decoder.logits(hidden[picks.rows.long()]), batch.trees
        slots = picks.slots.long()
        if trees is None:
            return self._given(logits, picks.samples, picks.counts, slots, picks.lengths)
        found = self._chosen(logits, picks.samples, picks.counts, slots, picks.lengths, self._paths(picks))
        plain = picks.plain.long()
        self._tokens[slots[plain], picks.lengths[plain].long()] = found.tokens[plain].clamp(min=0).int()
        verified = self._verified(batch, picks, trees, found.tokens, logits)
        trees.write(verified, self._tokens)
        if _branching(batch.work):
            self.pages.move(*trees.moves(verified))
        return found._replace(nodes=trees.nodes(verified))

    def _verified(
        self, batch: _Batch, picks: _Picks, trees: PlantedBatch, tokens: torch.Tensor, logits: torch.Tensor
    ) -> Verified:
        """Which nodes are accepted, by the rule of their requests: an engine has but one beside the walk."""
        nodes = picks.nodes.long()
        exact = walk(trees.batch, tokens[nodes])
        rules = [each.rule for each in batch.work if each.tree is not None]
        rule = next((each for each in rules if each is not None), None)
        if rule is None:
            return exact
        lossy = rule(trees.batch, tokens[nodes], self._params.probabilities(logits[nodes], picks.slots[nodes].long()))
        marked = send([each is not None for each in rules], torch.bool, self._device)
        return Verified(*(
            torch.where(marked if x.ndim == 1 else marked[:, None], x, y) for x, y in zip(lossy, exact, strict=True)
        ))  # fmt: skip

    def _given(
        self, logits: torch.Tensor, samples: Sequence[Sample], counts: Sequence[int], slots: torch.Tensor,
        lengths: torch.Tensor,
    ) -> Given:  # fmt: skip
        """Tokens of rows of logits, which join those of their samples."""
        found = self._chosen(logits, samples, counts, slots, lengths)
        self._tokens[slots, lengths.long()] = found.tokens.clamp(min=0).int()  # the next step may have begun
        return found

    def _chosen(
        self, logits: torch.Tensor, samples: Sequence[Sample], counts: Sequence[int], slots: torch.Tensor,
        lengths: torch.Tensor, proposed: tuple[torch.Tensor, ...] | None = None,
    ) -> Given:  # fmt: skip
        """Tokens of rows of logits."""
        arguments = self._params.of(samples, counts, slots, lengths, proposed)
        found = choose(logits, **arguments)
        asked = arguments["logprobs"] is not None
        return Given(found.tokens, found.logprobs if asked else None, found.top_tokens, found.top_logprobs)

    def _paths(self, picks: _Picks) -> tuple[torch.Tensor, ...] | None:
        """(rows, positions, tokens) of proposed tokens that rows have before them, where penalties ask for them."""
        if not any(sample.request.params.changes_logits for sample in picks.samples):
            return None
        entries: list[tuple[int, int, int]] = []
        row = 0
        for each in picks.sampled:
            for node in range(1 if each.tree is None else len(each.tree.tokens)):
                path = () if each.tree is None else each.tree.path(node)
                tokens = () if each.tree is None else each.tree.tokens
                entries += [(row, each.start + depth, tokens[n]) for depth, n in enumerate(path, 1)]
                row += 1
        columns = [list(column) for column in zip(*entries, strict=True)]
        return tuple(send_lists(columns, self._device)) if columns else None

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

    def _sent(self, work: Sequence[Work], growth: Growth, rows: int | None = None, total: int | None = None) -> _Batch:
        """Send what a step is about in one transfer, and bring the block table up to date.

        Args:
            work: of the step.
            growth: of the pages.
            rows, total: entries and tokens that the step is padded to; the first entry of padding has all that `total`
                leaves.
        """
        slots = [each.slot for each in work]
        starts, counts = [each.start for each in work], [each.count for each in work]
        cu = list(itertools.accumulate(counts, initial=0))
        width = -(-max(start + count for start, count in zip(starts, counts, strict=True)) // self.pages.page_size)
        planted = [
            Planted(each.tree, n, cu[n], each.start, each.slot)
            for n, each in enumerate(work) if each.tree is not None
        ]  # fmt: skip
        picked, picks = _picked(work, cu), None
        if rows is not None and total is not None:
            left = rows - len(work)
            slots += [len(self._tokens) - 1] * left
            starts += [0] * left
            counts += [total - cu[-1], *[0] * (left - 1)]
            cu += [total] * left
        sent = self._sent_with([cu, slots, starts, counts, *picked.lists], growth)
        if picked.sampled:
            picks = _Picks(picked.sampled, picked.samples, picked.counts, *sent[4:])
        trees = PlantedBatch(planted, self._device) if planted else None
        if trees is not None and not _branching(work):  # chains are parts of their requests' texts
            batch = trees.batch
            self._tokens[trees.slots_of_rows, batch.positions.long()] = batch.tokens
        cu_, slots_, starts_, counts_ = sent[:4]
        return _Batch(work, cu_, slots_, starts_, counts_, picks, trees, cu[-1], width)

    def _sent_with(self, lists: list[list[int]], growth: Growth) -> list[torch.Tensor]:
        """Send lists and what grew in one transfer, and bring the block tables up to date."""
        parts = [*lists, *map(list, zip(*growth.changes, strict=True))]
        on_device = send_lists([*parts, [page for pair in growth.copies for page in pair]], self._device)
        if growth.changes:
            group, slot, index, page = on_device[len(lists) : len(lists) + 4]
            self.pages.tables[group.long(), slot.long(), index.long()] = page
        if growth.copies:
            self.pages.pool.copy(on_device[-1].view(-1, 2))
        return on_device[: len(lists)]

    def _received(self, work: list[Work], given: Given | None, prompted: dict[int, Prompted]) -> Step:
        """A step whose results are on their way to the host."""
        if self._device.type != "cuda":
            return Step(work, given, prompted, None)
        if given is not None:
            given = Given(*(None if x is None else x.to("cpu", non_blocking=True) for x in given))  # type: ignore[arg-type]
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


def _branching(work: Sequence[Work]) -> bool:
    """Whether a step has a tree that is no chain."""
    return any(each.tree is not None and not is_chain(each.tree) for each in work)


class _Picked(NamedTuple):
    """Rows of a step after which a token is chosen."""

    sampled: list[Work]
    samples: list[Sample]  # of each row
    counts: list[int]  # tokens of the answer, of each row
    lists: tuple[list[int], ...]  # of `_Picks`, from `rows` on


def _picked(work: Sequence[Work], cu: Sequence[int]) -> _Picked:
    """The last row of each part that samples, and all nodes of trees."""
    found = _Picked([], [], [], ([], [], [], [], []))
    rows, slots, lengths, plain, nodes = found.lists
    for n, each in enumerate(work):
        if not each.samples:
            continue
        found.sampled.append(each)
        depths = (each.count - 1,) if each.tree is None else each.tree.depths
        (plain if each.tree is None else nodes).extend(range(len(rows), len(rows) + len(depths)))
        rows.extend([cu[n + 1] - 1] if each.tree is None else range(cu[n], cu[n + 1]))
        slots.extend([each.slot] * len(depths))
        lengths.extend(each.start + depth + 1 for depth in depths)
        found.samples.extend([each.sample] * len(depths))
        found.counts.extend(each.start + depth + 1 - each.sample.prompt_length for depth in depths)
    return found


@dataclass(frozen=True)
class _Picks:
    """The same on the device, int32."""

    sampled: list[Work]
    samples: list[Sample]
    counts: list[int]
    rows: torch.Tensor  # of the step
    slots: torch.Tensor
    lengths: torch.Tensor  # tokens, prompt included, of each
    plain: torch.Tensor  # which of them belong to no tree
    nodes: torch.Tensor  # which do, tree by tree


@dataclass(frozen=True)
class _Batch:
    """A step's entries, int32 on the device."""

    work: Sequence[Work]
    cu: torch.Tensor  # (entries + 1,)
    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    picks: _Picks | None
    trees: PlantedBatch | None
    total: int
    width: int  # pages of the longest
