"""A smaller model that says what the large one may say next, for all requests of a step together.

It reads the tokens and the sampling parameters that the large model's runner keeps by slot, and draws with the same
noise: where both models find the same token likely, both draw it. It has pages of its own. They are valid for one token
less than a request has, since its pending token was never computed, and for proposed tokens as far as these came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from tilewise.core.errors import InputError
from tilewise.engine.config import EngineConfig
from tilewise.engine.decoding.methods import Speculation
from tilewise.engine.groups import groups_of
from tilewise.engine.memory import make_pool
from tilewise.engine.models.decoder import Decoder
from tilewise.engine.models.load import decoder_of
from tilewise.engine.pages import Held, Pages
from tilewise.engine.request import Sample
from tilewise.engine.runner import Runner, Step
from tilewise.engine.scheduler import Work


def load_draft(speculation: Speculation | None, target: Decoder) -> Decoder | None:
    """The decoder of a draft model, beside its target's; None where there is none.

    Raises:
        InputError: it has another vocabulary, or is on another device.
    """
    if speculation is None or speculation.draft is None:
        return None
    dtype, draft = str(target.dtype).removeprefix("torch."), speculation.draft
    found = draft if isinstance(draft, Decoder) else decoder_of(draft, dtype=dtype, device=target.device)
    for name, own, wanted, hint in (
        ("vocabulary", found.config.vocab_size, target.config.vocab_size, "a smaller model of the same family has it"),
        ("device", found.device, target.device, "load it where the model is"),
    ):
        if own != wanted:
            raise InputError(f"draft {name}", got=own, expected=f"{wanted}, as the model", hint=hint)
    return found


def make_draft(decoder: Decoder, target: Runner, config: EngineConfig, max_length: int) -> Draft:
    """A draft model beside its target.

    Args:
        decoder: the draft model.
        target: the large model's runner.
        config: of the engine.
        max_length: tokens of a sequence of the engine at most.

    Raises:
        InputError: pages hold less than one sequence.
    """
    length = min(max_length, decoder.config.max_length)
    groups = groups_of(decoder.config.windows)
    pages = target.pages.allocator.num_pages
    pool = make_pool(decoder, groups, replace(config, num_pages=pages), length)
    own = Pages(pool, groups, target.pages.tables.shape[1], length, share=False)
    return Draft(Runner(decoder, own, config, length, beside=target), config.max_batch_tokens, length)


@dataclass
class _One:
    """What the draft's pages hold of a sample."""

    held: Held
    slot: int
    turn: int
    text: list[int]  # tokens whose keys and values are there


class Draft:
    """A draft model for the samples of an engine.

    Args:
        runner: of the draft model, with the tokens and parameters of the large model's.
        most: tokens of one of its steps at most.
        length: tokens of a sequence at most.
    """

    def __init__(self, runner: Runner, most: int, length: int) -> None:
        self._runner, self._pages, self._most, self._length = runner, runner.pages, most, length
        self._of: dict[Sample, _One] = {}

    def propose(self, asked: Sequence[tuple[Sample, int]]) -> dict[Sample, list[int]]:
        """What may come next.

        Args:
            asked: samples in their slots, whose tokens are all known, and how many tokens are wanted for each.

        Returns:
            Tokens of each sample; none where pages are missing.
        """
        self._drop_others()
        wanted = {sample: self._room(sample, count) for sample, count in asked}
        parts = {sample: self._prepared(sample, count) for sample, count in wanted.items() if count > 0}
        starts = {sample: start for sample, start in parts.items() if start is not None}
        found: dict[Sample, list[int]] = {sample: [] for sample in starts}
        steps = self._read(starts)
        for ahead in range(1, max((wanted[sample] for sample in starts), default=0)):
            works = [_work(sample, len(sample.tokens) - 1 + ahead, 1) for sample in starts if wanted[sample] > ahead]
            steps.append(self._launch(works))
        for step in steps:
            step.wait()
            tokens = [] if step.given is None else step.given.tokens.tolist()
            for each, token in zip((each for each in step.work if each.samples), tokens, strict=True):
                found[each.sample].append(token)
        for sample, tokens in found.items():
            self._of[sample].text = [*sample.tokens, *tokens[:-1]]
            found[sample] = list(takewhile(lambda token: token >= 0, tokens))
        return found

    def drop(self, sample: Sample) -> None:
        """Give back what a sample has."""
        one = self._of.pop(sample, None)
        if one is not None:
            self._pages.leave(one.slot)

    def drop_all(self) -> None:
        """Give back everything, as after an error."""
        for sample in [*self._of]:
            self.drop(sample)

    def _drop_others(self) -> None:
        """Give back what samples have that lost their slots since."""
        for sample, one in [*self._of.items()]:
            if (sample.slot, sample.turn) != (one.slot, one.turn):
                self.drop(sample)

    def _room(self, sample: Sample, count: int) -> int:
        """How many tokens may be proposed: the last one is not computed."""
        return min(count, self._length - len(sample.tokens))

    def _prepared(self, sample: Sample, count: int) -> int | None:
        """Where a sample's text must be read from, after room was made for it and for what follows; None without."""
        one = self._of.get(sample)
        if one is None:
            held = self._pages.start(sample.tokens, shared=False)
            one = self._of[sample] = _One(held, sample.slot, sample.turn, [])
            self._pages.seat(sample.slot, held)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(one.text, sample.tokens[:-1], strict=False))
        start = sum(1 for _ in same)
        self._pages.shrink(one.slot, start)
        one.text = one.text[:start]
        wanted = len(sample.tokens) + count - 1 - start
        if not self._pages.fits(one.held, wanted):
            return None
        self._pages.grow(one.slot, wanted)
        return start

    def _read(self, starts: dict[Sample, int]) -> list[Step]:
        """Read what is new of each text, in steps that are not too large; the last part of each gives a token."""
        steps, works, left = [], list[Work](), self._most
        for sample, start in starts.items():
            while start < len(sample.tokens):
                count = min(len(sample.tokens) - start, left)
                works.append(_work(sample, start, count))
                start, left = start + count, left - count
                if not left:
                    steps.append(self._launch(works))
                    works, left = [], self._most
        return [*steps, self._launch(works)] if works else steps

    def _launch(self, works: list[Work]) -> Step:
        step = self._runner.launch(works, self._pages.grown())
        self._pages.launched()
        return step


def _work(sample: Sample, start: int, count: int) -> Work:
    return Work(sample, sample.slot, start, count, start + count >= len(sample.tokens), sample.turn)
