"""A small Llama-style decoder whose operators are an argument (`demo.operators`).

RoPE (Su et al., 2021), RMSNorm (Zhang and Sennrich, 2019), SwiGLU (Shazeer, 2020), grouped-query attention (Ainslie et
al., 2023). Each block is given what stands in the residual stream and what is to be added to it, so that a norm adds
both before it begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import Rope, rope_tables
from tilewise.demo.operators import EPS, Operators


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. `hidden` is the width inside SwiGLU, `seqlen` the longest sequence it takes."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads_q: int
    num_heads_kv: int
    hidden: int
    seqlen: int
    rope_base: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads_q


class Cache:
    """Keys and values of the tokens so far: a growing pair of (batch, seqlen_k, num_heads_kv, head_dim) a layer."""

    def __init__(self, num_layers: int) -> None:
        self.pairs: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    @property
    def seqlen(self) -> int:
        first = self.pairs[0]
        return 0 if first is None else first[0].shape[1]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        old = self.pairs[layer]
        if old is not None:
            k, v = torch.cat((old[0], k), dim=1), torch.cat((old[1], v), dim=1)
        self.pairs[layer] = (k, v)
        return k, v


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, operators: Operators) -> None:
        super().__init__()
        self.config, self.operators = config, operators
        self.heads = config.num_heads_q + 2 * config.num_heads_kv
        self.qkv = nn.Linear(config.dim, self.heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rope: Rope, cache: Cache | None, layer: int) -> Tensor:
        batch, seqlen, _ = x.shape
        qkv: Tensor = self.qkv(x).view(batch, seqlen, self.heads, self.config.head_dim)
        q, k, v = self.operators.rotate(qkv, self.config.num_heads_q, self.config.num_heads_kv, rope)
        if cache is not None:
            k, v = cache.append(layer, k, v)
        o: Tensor = self.out(self.operators.attend(q, k, v).reshape(batch, seqlen, -1))
        return o


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig, operators: Operators) -> None:
        super().__init__()
        self.operators = operators
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.operators.swiglu(self.gate_up(x)))
        return y


class Block(nn.Module):
    def __init__(self, config: ModelConfig, operators: Operators) -> None:
        super().__init__()
        self.operators = operators
        self.norm_attention = nn.RMSNorm(config.dim, eps=EPS)
        self.attention = Attention(config, operators)
        self.norm_mlp = nn.RMSNorm(config.dim, eps=EPS)
        self.mlp = SwiGLU(config, operators)

    def forward(
        self, x: Tensor, residual: Tensor | None, rope: Rope, cache: Cache | None, layer: int
    ) -> tuple[Tensor, Tensor]:
        """(what is to be added, to what)"""
        y, residual = self.operators.norm(x, residual, self.norm_attention.weight)
        y, residual = self.operators.norm(self.attention(y, rope, cache, layer), residual, self.norm_mlp.weight)
        return self.mlp(y), residual


class Llama(nn.Module):
    """tokens (batch, seqlen) int64 -> logits (batch, seqlen, vocab_size); embedding and output matrix are tied."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, operators: Operators) -> None:
        super().__init__()
        self.config, self.operators = config, operators
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, operators) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=EPS)
        cos, sin = rope_tables(config.head_dim, config.seqlen, base=config.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's start: matrices that write into the residual stream are smaller by sqrt(2 × layers).
                writes = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.num_layers) ** 0.5 if writes else 0.02)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        return F.linear(self.hidden(tokens, cache), self.embedding.weight)

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """What the output matrix makes logits of: (batch, seqlen, dim)."""
        start = 0 if cache is None else cache.seqlen
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).repeat(tokens.shape[0])
        rope = Rope(self.cos, self.sin, positions)
        x, residual = self.embedding(tokens), None
        for layer, block in enumerate(self.blocks):
            x, residual = block(x, residual, rope, cache, layer)
        return self.operators.norm(x, residual, self.norm.weight)[0]

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats; both (batch, seqlen) int64."""
        return self.operators.loss(self.hidden(tokens), self.embedding.weight, targets)

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


@torch.no_grad()
def generate(
    model: Llama,
    tokens: list[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    stop: int | None = None,
) -> list[int]:
    """The prompt's tokens and up to `max_new_tokens` more, drawn from the `top_k` likeliest at `temperature`.

    Temperature 0 takes the likeliest. The prompt passes once; after that one query a step meets the cached keys. Stops
    at token `stop` or at the model's longest sequence.
    """
    device = model.embedding.weight.device
    draw = torch.Generator(device="cpu").manual_seed(seed)
    tokens = tokens[-model.config.seqlen + 1 :]
    cache, new = Cache(model.config.num_layers), tokens
    for _ in range(min(max_new_tokens, model.config.seqlen - len(tokens))):
        logits = model(torch.tensor([new], device=device), cache)[0, -1].float().cpu()
        if temperature > 0:
            best = torch.topk(logits / temperature, min(top_k, logits.numel()))
            pick = torch.multinomial(best.values.softmax(-1), 1, generator=draw)
            token = int(best.indices[pick])
        else:
            token = int(logits.argmax())
        if token == stop:
            break
        new = [token]
        tokens = tokens + new
    return tokens
