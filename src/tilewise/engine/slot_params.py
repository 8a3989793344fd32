"""How the next token of each slot is chosen: parameters on the device, by slot, and what a step needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilewise.engine.params import SamplingParams
from tilewise.engine.request import Sample
from tilewise.kv.transfer import send
from tilewise.ops.sampling import Penalties

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_OFF = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class Kind(NamedTuple):
    """What the samples of a step use, where that is no more than this."""

    greedy: bool
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False


class SlotParams:
    """Sampling parameters of the samples in their slots.

    Args:
        slots: how many there are.
        vocab_size: tokens of the model.
        tokens: int32 (slots, length), each slot's tokens, prompt and answer.
        ends: the model's end tokens.
    """

    def __init__(self, slots: int, vocab_size: int, tokens: torch.Tensor, ends: Sequence[int]) -> None:
        self._device, self._vocab_size, self._tokens, self._ends = tokens.device, vocab_size, tokens, ends
        self._numbers = torch.zeros(slots, len(_NUMBERS), device=self._device)
        self._top_k = torch.zeros(slots, dtype=torch.int32, device=self._device)
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._prompts = torch.zeros(slots, dtype=torch.int32, device=self._device)
        self._masks: dict[int, torch.Tensor] = {}
        self._kinds: dict[int, Kind | None] = {}
        self._late: set[int] = set()  # slots of samples that may not end at once

    def seat(self, samples: Sequence[Sample], slots: torch.Tensor) -> None:
        """Send samples' parameters to their slots, int64 (samples,) on the device."""
        params = [sample.request.params for sample in samples]
        numbers = [[float(getattr(each, name)) for name in _NUMBERS] for each in params]
        self._numbers[slots] = send(numbers, torch.float32, self._device)
        wholes = [[each.top_k, s.prompt_length, s.seed] for each, s in zip(params, samples, strict=True)]
        sent = send(wholes, torch.int64, self._device)
        self._top_k[slots], self._prompts[slots] = sent[:, 0].int(), sent[:, 1].int()
        self._seeds[slots] = sent[:, 2]
        for each, sample in zip(params, samples, strict=True):
            self._kinds[sample.slot] = _kind_of(each)
            (self._late.add if each.min_tokens else self._late.discard)(sample.slot)
            self._masks.pop(sample.slot, None)
            if each.allowed_token_ids is not None:
                self._masks[sample.slot] = self._mask(each.allowed_token_ids)

    def kind(self, samples: Sequence[Sample], counts: Sequence[int]) -> Kind | None:
        """What these samples use; None where logits are changed first, or log-probabilities are asked for.

        Args:
            samples: in their slots.
            counts: tokens that each has of its answer.
        """
        kinds = {self._kinds[sample.slot] for sample in samples}
        if None in kinds:
            return None
        if self._late and any(
            count < sample.request.params.min_tokens for sample, count in zip(samples, counts, strict=True)
        ):
            return None
        drawn = [kind for kind in kinds if kind is not None and not kind.greedy]
        return Kind(False, *(any(column) for column in list(zip(*drawn, strict=True))[1:])) if drawn else Kind(True)

    def plain(self, slots: torch.Tensor, lengths: torch.Tensor, kind: Kind) -> dict[str, Any]:
        """Arguments of `tilewise.sample` for samples of one kind.

        Args:
            slots: int64 (rows,), theirs, on the device.
            lengths: int32 (rows,), tokens that each has, prompt included.
            kind: of all of them.
        """
        if kind.greedy:
            return {"temperature": 0.0}
        numbers = self._numbers[slots]
        found: dict[str, Any] = {"seeds": self._seeds[slots], "positions": lengths}
        for name, used in (("temperature", True), ("top_p", kind.top_p), ("min_p", kind.min_p)):
            if used:
                found[name] = numbers[:, _NUMBERS.index(name)].contiguous()
        return found | ({"top_k": self._top_k[slots]} if kind.top_k else {})

    def probabilities(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Of tokens, (rows, vocab_size), by the temperature alone of the rows' slots, int64 (rows,)."""
        temperature = self._numbers[slots][:, :1]
        sharp = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
        soft = torch.softmax(logits / torch.where(temperature > 0, temperature, 1.0), -1)
        return torch.where(temperature > 0, soft, sharp)

    def of(
        self, samples: Sequence[Sample], counts: Sequence[int], slots: torch.Tensor, lengths: torch.Tensor,
        proposed: tuple[torch.Tensor, ...] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Arguments of `tilewise.sample` for one row of logits of each sample.

        Args:
            samples: whose rows these are.
            counts: tokens that each has of its answer.
            slots: int64 (rows,), theirs, on the device.
            lengths: int32 (rows,), tokens that each has, prompt included.
            proposed: int32 (rows, positions, tokens) of tokens that rows have beside those of their slots.
        """
        params = [sample.request.params for sample in samples]
        numbers = self._numbers[slots]
        columns = {name: numbers[:, n].contiguous() for n, name in enumerate(_NUMBERS)}
        used = {name: any(getattr(each, name) != off for each in params) for name, off in _OFF.items()}
        greedy = all(each.greedy for each in params)
        kind = Kind(greedy, any(each.top_k for each in params), used["top_p"], used["min_p"])
        found = self.plain(slots, lengths, kind)
        kinds = {kind: f"{kind}_penalty" for kind in ("repetition", "presence", "frequency")}
        if any(used[name] for name in kinds.values()):
            chosen = {kind: columns[name] if used[name] else None for kind, name in kinds.items()}
            tokens = self._tokens[slots]
            if proposed is not None:
                rows, positions, values = proposed
                tokens[rows.long(), positions.long()] = values
            found["penalties"] = Penalties(tokens, self._prompts[slots], lengths, **chosen)
        found["bias"] = self._bias(samples, counts)
        if any(sample.slot in self._masks for sample in samples):
            found["allowed"] = self._allowed(samples)
        listed = [each.logprobs for each in params if each.logprobs is not None]
        found["logprobs"] = max(listed) if listed else None
        return found

    def _bias(self, samples: Sequence[Sample], counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Biases, bans, and end tokens of answers that are still too short, padded to one width."""
        rows = []
        for sample, count in zip(samples, counts, strict=True):
            params = sample.request.params
            row = dict(params.logit_bias) | dict.fromkeys(params.bad_token_ids, -torch.inf)
            if count < params.min_tokens:
                ends = () if params.ignore_eos else self._ends
                row |= dict.fromkeys([*ends, *params.stop_token_ids], -torch.inf)
            rows.append(row)
        width = max(map(len, rows))
        if not width:
            return None
        tokens = [[*row, *[-1] * (width - len(row))] for row in rows]
        values = [[*row.values(), *[0.0] * (width - len(row))] for row in rows]
        return send(tokens, torch.int32, self._device), send(values, torch.float32, self._device)

    def _allowed(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """(masks, mask of each row)."""
        having = [sample.slot for sample in samples if sample.slot in self._masks]
        at = {slot: n for n, slot in enumerate(having)}
        of = [at.get(sample.slot, -1) for sample in samples]
        return torch.stack([self._masks[slot] for slot in having]), send(of, torch.int32, self._device)

    def _mask(self, tokens: Sequence[int]) -> torch.Tensor:
        """Bit v % 32 of word v // 32 for each of these tokens v."""
        bits = torch.zeros(-(-self._vocab_size // 32) * 32, dtype=torch.int64, device=self._device)
        bits[send(tokens, torch.int64, self._device)] = 1
        words = (bits.view(-1, 32) << torch.arange(32, device=self._device)).sum(1)
        return torch.where(words >= 2**31, words - 2**32, words).int()


def _kind_of(params: SamplingParams) -> Kind | None:
    """What one sample uses."""
    if params.changes_logits or params.logprobs is not None:
        return None
    return Kind(params.greedy, params.top_k > 0, params.top_p != 1.0, params.min_p > 0)
