"""Tokens from logits: penalties, bias, bans, temperature, top-k, top-p, min-p and the draw in one call, without a wait
for the GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.core.tensors import check_dense
from tilewise.ops.sampling.problem import Penalties, Sampled, make_call
from tilewise.ops.sampling.table import SAMPLE

__all__ = ["Penalties", "Sampled", "combine_shards", "sample"]


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor | float | None = None,
    top_k: torch.Tensor | int | None = None,
    top_p: torch.Tensor | float | None = None,
    min_p: torch.Tensor | float | None = None,
    seeds: torch.Tensor | int | None = None,
    positions: torch.Tensor | int | None = None,
    penalties: Penalties | None = None,
    bias: tuple[torch.Tensor, torch.Tensor] | None = None,
    allowed: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    first_token: int = 0,
    logprobs: int | None = None,
    logprobs_of: str = "raw",
    impl: str | None = None,
) -> Sampled:
    """One token for each row of logits.

    In this order: penalties, bias, allowed tokens, temperature, top-k, top-p, min-p, and a draw by the Gumbel-max
    trick: the token with the largest logit / temperature - log(-log(u)). u is word token % 4 of what Philox4x32-10
    gives for the row's seed as key and (token // 4, position, constant, 0) as counter. So a token depends on its row,
    seed and position alone: not on other rows, the order or number of rows, the device, or how the vocabulary is
    sharded. Noise is float32 (float64 in the reference), so implementations may choose differently if two values differ
    by about 1e-6 of their size, or if a sum of probabilities equals top_p to the last bits.

    Of equal logits the first comes first: greedy rows take the lowest index, top-k keeps exactly k tokens and top-p
    as few as it needs, in the order of probability, then of index.

    Args:
        logits: (R, V), float16, bfloat16 or float32. R rows, V tokens. No gradient passes through.
        temperature: float32 (R,) or a number, 0 or above; below 1e-5 the row is greedy, and ignores top_k, top_p, min_p
            and seeds. None is 1.
        top_k: int32 (R,) or an int: how many tokens are kept. 0 or None is off.
        top_p: float32 (R,) or a number from 0 to 1: of the kept tokens, the smallest set of the most likely ones whose
            probabilities sum to at least top_p. 1 or None is off.
        min_p: float32 (R,) or a number from 0 to 1: of the kept tokens, those with at least min_p times the largest
            probability. 0 or None is off.
        seeds: int64 (R,) or an int. Rows with one seed and position draw the same noise.
        positions: int32 or int64 (R,) or an int: the position that the token will have in its sequence, modulo 2**32.
            Seeds and positions may be None if temperature is the number 0.
        penalties: a `tilewise.Penalties`.
        bias: (tokens, values), int32 and float32 (R, K): values are added to these logits, -inf bans a token. Tokens of
            -1, and others outside the vocabulary, are padding. Values of a token that comes twice add up, in any order.
        allowed: int32 (R, ceil(V / 32)), bits: bit v % 32 of word v // 32 says whether token v may be chosen. Or
            (masks, mask_of), with masks int32 (M, ceil(V / 32)) and the mask of each row, int32 (R,); a negative number
            allows all.
        first_token: vocabulary index of the first column, where columns are a shard of the vocabulary. Tokens in
            `penalties`, `bias` and results count from 0; top-k, top-p, min-p and log probabilities see the shard alone.
        logprobs: how many of the most likely tokens to list, from 0 to V; None makes no lists.
        logprobs_of: "raw": log softmax of the logits as given; "processed": of the distribution that is drawn from,
            after temperature and truncation (for greedy rows, at temperature 1).
        impl: "triton", "cpu" or "reference"; None picks the first that can.

    Returns:
        `Sampled(tokens, values, logprobs, top_tokens, top_logprobs)`. A row with a NaN or +inf among its logits gives
        token -1 and value NaN; one that bans all tokens -1 and -inf. Their log probabilities are NaN. Listed tokens of
        probability 0 are -1.

    On a GPU bias, truncation and lists of processed logits take 4 bytes of memory for each logit, penalties 4 more.

    Values of tensors (a negative temperature, lengths beyond the history) are checked on a CPU, and on a GPU with
    TILEWISE_DEBUG=1.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl` cannot run this call.

    Source: Gumbel-max trick, Maddison, Tarlow and Minka, "A* Sampling", 2014; top-k, Fan, Lewis and Dauphin,
    "Hierarchical Neural Story Generation", 2018; top-p, Holtzman et al., "The Curious Case of Neural Text
    Degeneration", 2020; min-p, Nguyen et al., "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM
    Outputs", 2024.

    Example:
        >>> logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 9.0, 0.0]])
        >>> tw.sample(logits, temperature=0).tokens.tolist()
        [1, 2]
        >>> drawn = tw.sample(logits, temperature=0.7, top_p=0.5, seeds=torch.tensor([1, 2]), positions=17, logprobs=2)
        >>> drawn.top_tokens.tolist()
        [[1, 3], [2, 0]]
    """
    by_row = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seeds": seeds,
        "positions": positions,
    }
    call = make_call(logits, penalties, bias, allowed, by_row, first_token, logprobs, logprobs_of)
    return Sampled(*SAMPLE(call, impl))


def combine_shards(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens of a whole vocabulary from those of its shards: exact for rows without top-k, top-p and min-p.

    Each rank calls `sample` on its columns with its `first_token`, and gathers values and tokens of all. A token wins
    by its value, the lowest index among equals.

    Args:
        values: float32 (world, R), as `sample` gives them.
        tokens: int64 (world, R).

    Returns:
        int64 (R,); -1 where a shard had NaN logits, or every shard bans all its tokens.

    Raises:
        InputError: an argument is wrong.

    Example:
        >>> logits = torch.tensor([[1.0, 3.0, 2.0, 4.0]])
        >>> shards = [tw.sample(logits[:, n : n + 2], temperature=0, first_token=n) for n in (0, 2)]
        >>> values, tokens = (torch.stack(x) for x in ([s.values for s in shards], [s.tokens for s in shards]))
        >>> tw.combine_shards(values, tokens).tolist()
        [3]
    """
    _check("values", values, torch.float32)
    _check("tokens", tokens, torch.int64)
    if tokens.shape != values.shape or tokens.device != values.device:
        raise InputError(
            "tokens",
            got=f"shape {tuple(tokens.shape)} on {tokens.device}",
            expected=f"shape {tuple(values.shape)} on {values.device}, as values",
            hint="gather both from the same calls",
        )
    last = torch.iinfo(torch.int64).max
    wins = (values == values.amax(0)) & (tokens >= 0)  # a NaN equals nothing
    best = torch.where(wins, tokens, last).amin(0)
    return best.masked_fill(best == last, -1)


def _check(name: str, x: Any, dtype: torch.dtype) -> None:
    expected, hint = f"a dense {dtype} tensor (world, R)", "torch.stack what the ranks return"
    check_dense(name, x, expected, hint)
    if x.ndim != 2 or not x.shape[0]:
        raise InputError(name, got=f"shape {tuple(x.shape)}", expected=expected, hint=hint)
    if x.dtype != dtype:
        raise InputError(name, got=str(x.dtype), expected=expected, hint=hint)
