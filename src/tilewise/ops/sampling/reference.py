"""The specification, one row after another. Processed logits are float32, rounded after each step; what follows them
(probabilities, noise, sums) is float64.
"""

from __future__ import annotations

import torch

from tilewise.core.philox import philox
from tilewise.ops.sampling.problem import DOMAIN, GREEDY_BELOW, Call

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills the results."""
    for row in range(call.logits.shape[0]):
        raw, y = call.logits[row].double(), processed(call, row)
        temperature = temperature_of(call, row)
        greedy = temperature < GREEDY_BELOW
        keep = torch.ones_like(y, dtype=torch.bool) if greedy else kept(call, row, y)
        z = torch.where(keep, y if greedy else y / temperature, -torch.inf)
        value = z if greedy else z + noise(call, row)
        failed = not bool((raw < torch.inf).all()) or not bool((y < torch.inf).all())
        best = int(value.argmax())  # the first of equal ones
        none = failed or not bool(value[best] > -torch.inf)
        results["tokens"][row] = -1 if none else best + call.first_token
        results["values"][row] = torch.nan if failed else value[best]
        logs = (z if call.processed else raw).log_softmax(0)
        results["logprobs"][row] = torch.nan if none else logs[best]
        if call.top >= 0:
            order = logs.argsort(descending=True, stable=True)[: call.top]
            missing = torch.full_like(order, none, dtype=torch.bool) | (logs[order] == -torch.inf)
            results["top_tokens"][row] = torch.where(missing, -1, order + call.first_token)
            results["top_logprobs"][row] = torch.nan if none else logs[order]


def temperature_of(call: Call, row: int) -> float:
    """0 where the row is greedy."""
    if call.greedy:
        return 0.0
    return 1.0 if call.temperature is None else float(call.temperature[row])


def processed(call: Call, row: int) -> torch.Tensor:
    """Logits of a row after penalties, bias and bans; float32 numbers in float64."""
    y = call.logits[row].float()
    y = torch.where(y == 0.0, 0.0, y)  # both zeros are equal
    if call.history is not None:
        prompt, output = counts(call, row)
        if call.repetition is not None:
            p = call.repetition[row]
            y = torch.where(prompt + output > 0, torch.where(y > 0, y / p, y * p), y)
        if call.frequency is not None:
            y = y - call.frequency[row] * output
        if call.presence is not None:
            y = y - call.presence[row] * (output > 0)
    if call.bias_tokens is not None and call.bias_values is not None:
        for token, value in zip(call.bias_tokens[row].tolist(), call.bias_values[row], strict=True):
            if token >= 0 and 0 <= token - call.first_token < len(y):
                y[token - call.first_token] += value
    if call.allowed is not None:
        mask = row if call.mask_of is None else int(call.mask_of[row])
        if mask >= 0:
            v = torch.arange(len(y), device=y.device)
            y = torch.where((call.allowed[mask].long()[v // 32] >> (v % 32)) & 1 == 1, y, -torch.inf)
    return y.double()


def counts(call: Call, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each token is in the prompt and in the output, float32."""
    assert call.history is not None
    assert call.prompt_lengths is not None
    assert call.lengths is not None
    request = row if call.request is None else int(call.request[row])
    found = torch.zeros(2, call.logits.shape[1], device=call.logits.device)
    for n, token in enumerate(call.history[request, : int(call.lengths[request])].tolist()):
        if 0 <= token - call.first_token < found.shape[1]:
            found[int(n >= int(call.prompt_lengths[request])), token - call.first_token] += 1
    return found[0], found[1]


def kept(call: Call, row: int, y: torch.Tensor) -> torch.Tensor:
    """Which tokens top-k, top-p and min-p leave, each of what the one before left."""
    order = y.argsort(descending=True, stable=True)  # the lowest index first among equals
    weights = ((y - y.max()) / temperature_of(call, row))[order].exp().nan_to_num()
    left = torch.ones_like(order, dtype=torch.bool)
    if call.top_k is not None and int(call.top_k[row]) > 0:
        left[int(call.top_k[row]) :] = False
    if call.top_p is not None and float(call.top_p[row]) < 1.0:
        weights = weights * left
        before = weights.cumsum(0) - weights
        left &= before < float(call.top_p[row]) * weights.sum()
        left[0] = True
    if call.min_p is not None:
        left &= weights >= float(call.min_p[row]) * weights[0]
    return torch.zeros_like(left).scatter(0, order, left)


def words(call: Call, row: int) -> torch.Tensor:
    """The 32 random bits of each token of a row, int64."""
    assert call.seeds is not None
    assert call.positions is not None
    v = torch.arange(call.logits.shape[1], device=call.logits.device) + call.first_token
    position, domain = (torch.as_tensor(x, device=v.device) for x in (int(call.positions[row]), DOMAIN))
    drawn = torch.stack(philox(int(call.seeds[row]), v // 4, position, domain))
    return drawn.gather(0, (v % 4)[None])[0]


def distance(words: torch.Tensor) -> torch.Tensor:
    """1 - u for the uniform numbers u that 32 random bits make, float32 in the open interval (0, 1). Of 1 - u all bits
    count where u is near 1, and that is where tokens win.
    """
    return (words.float() * 2.0**-32 + 2.0**-33).clamp(max=1.0 - 2.0**-24)


def noise(call: Call, row: int) -> torch.Tensor:
    """Gumbel variables -log(-log(u)), float64."""
    return -torch.log(-torch.log1p(-distance(words(call, row)).double()))
