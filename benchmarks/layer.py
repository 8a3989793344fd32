"""A layer of the demo's model, forward and backward: ours and PyTorch's on the same weights and inputs.

What stands in the residual stream and what is to be added to it come in, and a gradient for each comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import tilewise as tw
from benchmarks.contenders import SDPA_BACKENDS, sdpa
from tilewise.demo.model import Block, ModelConfig
from tilewise.demo.operators import TORCH_OPERATORS, Operators, tilewise_operators
from tools.families import FAMILIES

# 8/3 of the width inside SwiGLU, up to a multiple of 256, is Llama's rule (Touvron et al., 2023); as many heads of keys
# as of queries, since not every PyTorch gives cuDNN fewer
LARGE = ModelConfig(1, dim=2048, num_layers=1, num_heads_q=16, num_heads_kv=16, hidden=5632, seqlen=4096)
SMALL = ModelConfig(1, dim=32, num_layers=1, num_heads_q=2, num_heads_kv=2, hidden=48, seqlen=24)

Tensors = tuple[torch.Tensor, ...]
Step = Callable[[], Tensors]


@dataclass(frozen=True)
class Layer:
    """Weights, and x, residual and the gradients of both outputs, (batch, seqlen, dim), all of one dtype."""

    config: ModelConfig
    weights: dict[str, torch.Tensor]
    tokens: list[torch.Tensor]  # x, residual, and what comes in behind

    @property
    def operations(self) -> int:
        """Of the matrix products and of attention's visible pairs, whose backward counts 2.5 times."""
        (batch, seqlen, dim), config = self.tokens[0].shape, self.config
        qkv = (config.num_heads_q + 2 * config.num_heads_kv) * config.head_dim
        products = 2 * batch * seqlen * dim * (qkv + dim + 3 * config.hidden)
        attention = 4 * dim * batch * seqlen * (seqlen + 1) // 2
        return 3 * products + 7 * attention // 2

    @property
    def shape(self) -> str:
        """For the record."""
        batch, seqlen, dim = self.tokens[0].shape
        config = self.config
        return f"{batch:,} × {seqlen:,} × {dim:,} in {config.num_heads_q} heads, {config.hidden:,} hidden"

    def step(self, operators: Operators, *, compiled: bool = False) -> Step:
        """A call that gives both outputs and the gradients of x, residual and each weight."""
        device, dtype = self.tokens[0].device, self.tokens[0].dtype
        with torch.device(device):
            block = Block(self.config, operators).to(dtype)
        block.load_state_dict(self.weights)
        x, residual = (t.clone().requires_grad_() for t in self.tokens[:2])
        batch, seqlen, _ = x.shape
        positions = torch.arange(seqlen, device=device).repeat(batch)
        rope = tw.Rope(*tw.rope_tables(self.config.head_dim, seqlen, device=device), positions)
        wanted = (x, residual, *block.parameters())

        def forward(x: torch.Tensor, residual: torch.Tensor) -> Tensors:
            found: Tensors = block(x, residual, rope, None, 0)
            return found

        run = torch.compile(forward, dynamic=False, fullgraph=True) if compiled else forward

        def call() -> Tensors:
            outputs = run(x, residual)
            gradients = torch.autograd.grad(outputs, wanted, self.tokens[2:])
            return *(o.detach() for o in outputs), *gradients

        return call

    def reference(self) -> Tensors:
        """What a step gives, by PyTorch in float64, one sequence after another, for the memory of one."""
        weights = {name: weight.double() for name, weight in self.weights.items()}
        found = []
        for tokens in zip(*(t.double().split(1) for t in self.tokens), strict=True):
            found.append(replace(self, weights=weights, tokens=list(tokens)).step(TORCH_OPERATORS)())
        rows, sums = 4, list(zip(*found, strict=True))
        return *(torch.cat(parts) for parts in sums[:rows]), *(torch.stack(parts).sum(0) for parts in sums[rows:])

    def contenders(self, compiled: bool) -> dict[str, Step]:
        """Steps by name: all of it by tilewise, or all of it by PyTorch with attention by the best of its back ends."""
        name, backend = next(iter(SDPA_BACKENDS[self.tokens[0].device.type].items()))
        plain = replace(TORCH_OPERATORS, attend=sdpa(backend, causal=True))
        found = {"tilewise.eager": self.step(tilewise_operators()), f"eager.{name}": self.step(plain)}
        if compiled:
            torch._dynamo.reset()
            found["tilewise.compile"] = self.step(tilewise_operators(), compiled=True)
            found[f"compile.{name}"] = self.step(plain, compiled=True)
        return found


def make(config: ModelConfig, batch: int, device: str, dtype: torch.dtype) -> Layer:
    """A layer with numbers of its own, the same every time."""
    torch.manual_seed(0)
    weights = Block(config, TORCH_OPERATORS).to(device, dtype).state_dict()
    tokens = [torch.randn(batch, config.seqlen, config.dim).to(device, dtype) for _ in range(4)]
    return Layer(config, weights, tokens)


def sources_of(name: str, device: str) -> str | None:
    """Hash of the sources of all that a layer of ours runs; None for contenders not ours."""
    return FAMILIES[f"layer_{device}"].hash() if name.startswith("tilewise") else None
