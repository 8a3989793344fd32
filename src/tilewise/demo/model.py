"""A small Llama-style decoder whose attention is an argument.

RoPE (Su et al., 2021), RMSNorm (Zhang and Sennrich, 2019), SwiGLU (Shazeer, 2020), grouped-query attention (Ainslie et
al., 2023). The attention is any function `attend(q, k, v) -> o` in the library's convention: q (batch, seqlen_q,
num_heads_q, head_dim), k and v (batch, seqlen_k, num_heads_kv, head_dim), causal with the last query on the last key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


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


def rope_tables(seqlen: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position × base**(-2d / head_dim), each (seqlen, 1, head_dim / 2) fp32."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(seqlen, dtype=torch.float64), frequency)[:, None, :]
    return angle.cos().float(), angle.sin().float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves (x1, x2) of the last axis of x (batch, seqlen, heads, head_dim) by the angle of each position."""
    x1, x2 = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.config, self.attend = config, attend
        self.heads = (config.num_heads_q, config.num_heads_kv, config.num_heads_kv)
        self.qkv = nn.Linear(config.dim, sum(self.heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None, layer: int) -> Tensor:
        batch, seqlen, _ = x.shape
        heads: Tensor = self.qkv(x).view(batch, seqlen, sum(self.heads), self.config.head_dim)
        q, k, v = torch.split(heads, list(self.heads), dim=2)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if cache is not None:
            k, v = cache.append(layer, k, v)
        o: Tensor = self.out(self.attend(q, k, v).reshape(batch, seqlen, -1))
        return o


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class Block(nn.Module):
    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config, attend)
        self.norm_mlp = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None, layer: int) -> Tensor:
        x = x + self.attention(self.norm_attention(x), cos, sin, cache, layer)
        y: Tensor = x + self.mlp(self.norm_mlp(x))
        return y


class Llama(nn.Module):
    """tokens (batch, seqlen) int64 -> logits (batch, seqlen, vocab_size); embedding and output matrix are tied."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        cos, sin = rope_tables(config.seqlen, config.head_dim, config.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's start: matrices that write into the residual stream are smaller by sqrt(2 × layers).
                writes = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.num_layers) ** 0.5 if writes else 0.02)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        start = 0 if cache is None else cache.seqlen
        rows = slice(start, start + tokens.shape[1])
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, self.cos[rows], self.sin[rows], cache, layer)
        return F.linear(self.norm(x), self.embedding.weight)

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
