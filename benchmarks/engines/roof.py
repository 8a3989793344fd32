"""The least time of a workload: what must be read, at the rate of a copy, and multiplied, at that of a matrix product.

A step of decoding reads all weights once (of an embedding that is not the head, no more than rows), and keys and values
of all tokens before the new ones, those of a shared prefix once. Prompts are matrix products, of tokens that nobody has
computed before, and attention over what they see. Steps are as few as the longest answers have tokens.
"""

from __future__ import annotations

from benchmarks.engines.workloads import Workload
from tilewise.engine.models.config import ModelConfig


def products(config: ModelConfig) -> int:
    """Weights that multiply each token in the layers."""
    of_q, of_kv = config.num_heads * config.head_dim, config.num_heads_kv * config.head_dim
    attention = config.hidden_size * (2 * of_q + 2 * of_kv)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def step_bytes(config: ModelConfig, itemsize: int) -> int:
    """Weights that a step reads."""
    return itemsize * (products(config) + config.vocab_size * config.hidden_size)


def token_bytes(config: ModelConfig, itemsize: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * itemsize * config.num_layers * config.num_heads_kv * config.head_dim


def seconds(config: ModelConfig, itemsize: int, workload: Workload, *, tflops: float, gbps: float) -> float:
    """The least time of a workload whose requests all come at once.

    Args:
        config: the model.
        itemsize: bytes of a weight, and of a number in the KV cache.
        workload: what is computed.
        tflops: TFLOP/s of a matrix product.
        gbps: GB/s of a copy, bytes read and bytes written.

    Returns:
        Seconds.
    """
    turns = list(workload.turns())
    operations = 0
    for number, turn in enumerate(turns):
        known = turn.known or (workload.shared if number else 0)  # the first computes the prefix for all
        new = turn.prompt - known
        pairs = new * known + new * (new + 1) // 2
        operations += 2 * products(config) * new
        operations += 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    # the first token of an answer comes from its prompt
    steps = max(sum(turn.count - 1 for turn in Workload("", (request,)).turns()) for request in workload.requests)
    tokens = sum((turn.count - 1) * turn.prompt + (turn.count - 1) * (turn.count - 2) // 2 for turn in turns)
    tokens -= workload.shared * (sum(turn.count - 1 for turn in turns) - steps)
    read = steps * step_bytes(config, itemsize) + tokens * token_bytes(config, itemsize)
    return operations / tflops / 1e12 + read / gbps / 1e9
