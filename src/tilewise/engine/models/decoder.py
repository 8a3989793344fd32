"""One decoder for Llama, Mistral, Qwen2 and Qwen3: what differs between them are flags of its config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tilewise.engine.models.config import ModelConfig
from tilewise.frequencies import rope_tables
from tilewise.ops.glu import swiglu
from tilewise.ops.linear import linear
from tilewise.ops.linear.fast import fast_linear
from tilewise.ops.norm import rms_norm

Norms = tuple[torch.Tensor | None, torch.Tensor | None]  # weights of the norms of q and k, or none
# (layer, projections, norms) -> output (tokens, heads, head_dim): norms of q and k, rotation and attention. Projections
# are (tokens, heads, head_dim), heads of q, then of k, then of v.
Attend = Callable[[int, torch.Tensor, Norms], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, as products take them: (out, in); projections of one input are one matrix."""

    norm: torch.Tensor  # (hidden,)
    qkv: torch.Tensor  # ((heads + 2 heads_kv) * head_dim, hidden)
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # (head_dim,)
    k_norm: torch.Tensor | None
    sink: torch.Tensor | None  # (heads,)
    o: torch.Tensor  # (hidden, heads * head_dim)
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # (hidden,)
    gate_up: torch.Tensor  # (2 * intermediate, hidden)
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # (hidden, intermediate)
    down_bias: torch.Tensor | None


class Decoder:
    """A decoder's weights and what it computes; where keys and values live is the caller's business.

    Args:
        config: sizes and flags.
        dtype: of weights and of all that lies between operations.
        device: where it runs.

    Attributes:
        invariant: whether a row's products have the same bits whatever other rows there are; slower on a GPU.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.invariant = False
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        self.head = self.embedding if config.tied else self._empty(config.vocab_size, config.hidden_size)
        self.norm = self._empty(config.hidden_size)
        self.layers = [self._layer() for _ in range(config.num_layers)]

    def named(self) -> dict[str, torch.Tensor]:
        """Where a checkpoint's tensors go: views of the weights by the names of Hugging Face's files."""
        config = self.config
        sizes = [config.num_heads * config.head_dim, *[config.num_heads_kv * config.head_dim] * 2]
        found = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not config.tied:
            found["lm_head.weight"] = self.head
        for n, layer in enumerate(self.layers):
            own = {"input_layernorm.weight": layer.norm, "post_attention_layernorm.weight": layer.mlp_norm}
            parts = [
                (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.qkv, layer.qkv_bias, sizes),
                (("self_attn.o_proj",), layer.o, layer.o_bias, None),
                (("mlp.gate_proj", "mlp.up_proj"), layer.gate_up, layer.gate_up_bias, [config.intermediate_size] * 2),
                (("mlp.down_proj",), layer.down, layer.down_bias, None),
            ]
            for names, weight, bias, rows in parts:
                for kind, whole in (("weight", weight), ("bias", bias)):
                    if whole is not None:
                        pieces = torch.split(whole, rows) if rows else (whole,)
                        own |= {f"{name}.{kind}": piece for name, piece in zip(names, pieces, strict=True)}
            if layer.q_norm is not None and layer.k_norm is not None:
                own |= {"self_attn.q_norm.weight": layer.q_norm, "self_attn.k_norm.weight": layer.k_norm}
            if layer.sink is not None:
                own["self_attn.sinks"] = layer.sink
            found |= {f"model.layers.{n}.{name}": x for name, x in own.items()}
        return found

    @property
    def bytes(self) -> int:
        """Of all weights."""
        return sum(x.nbytes for x in self.named().values())

    def rope_tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of positions 0 to length - 1, float32."""
        config = self.config
        return rope_tables(config.head_dim, length, base=config.rope_base, scaling=config.scaling, device=self.device)

    def hidden(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        """What the last norm gives.

        Args:
            tokens: integers (tokens,), of any requests one after another.
            attend: attention of one layer over what the tokens may see, with all between its projections.

        Returns:
            (tokens, hidden_size).
        """
        x = F.embedding(tokens, self.embedding)
        residual: torch.Tensor | None = None
        for n, layer in enumerate(self.layers):
            x, residual = self._normed(x, layer.norm, residual)
            qkv = self._linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self.config.head_dim)
            x = self._linear(attend(n, qkv, (layer.q_norm, layer.k_norm)).flatten(1), layer.o, layer.o_bias)
            x, residual = self._normed(x, layer.mlp_norm, residual)
            x = self._linear(
                self._swiglu(self._linear(x, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias
            )
        return self._normed(x, self.norm, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, vocab_size), float32, of what `hidden` gave for some tokens."""
        if self.invariant:
            return linear(hidden, self.head, out_dtype=torch.float32)
        if hidden.is_cuda and hidden.dtype != torch.float32:  # not rounded: many logits would be equal
            return torch.mm(hidden, self.head.t(), out_dtype=torch.float32)
        return fast_linear(hidden, self.head).float()

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, weight, bias) if self.invariant else fast_linear(x, weight, bias)

    def _normed(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the norm of x + residual, that sum). On a CPU PyTorch's own, which has the least host time there."""
        if x.device.type == "cpu":
            total = x if residual is None else x + residual
            return F.rms_norm(total, weight.shape, weight, self.config.norm_eps), total
        found = rms_norm(x, weight, residual=residual, eps=self.config.norm_eps)
        normed, total = (found, x) if isinstance(found, torch.Tensor) else found
        return normed, total

    def _swiglu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up; on a CPU by PyTorch's own operations."""
        if x.device.type == "cpu":
            gate, up = x.chunk(2, -1)
            return F.silu(gate).mul_(up)
        return swiglu(x)

    def _layer(self) -> Layer:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        of_q, of_kv = config.num_heads * config.head_dim, config.num_heads_kv * config.head_dim
        return Layer(
            norm=self._empty(hidden),
            qkv=self._empty(of_q + 2 * of_kv, hidden),
            qkv_bias=self._empty(of_q + 2 * of_kv) if config.qkv_bias else None,
            q_norm=self._empty(config.head_dim) if config.qk_norm else None,
            k_norm=self._empty(config.head_dim) if config.qk_norm else None,
            sink=self._empty(config.num_heads) if config.sinks else None,
            o=self._empty(hidden, of_q),
            o_bias=self._empty(hidden) if config.o_bias else None,
            mlp_norm=self._empty(hidden),
            gate_up=self._empty(2 * inner, hidden),
            gate_up_bias=self._empty(2 * inner) if config.mlp_bias else None,
            down=self._empty(hidden, inner),
            down_bias=self._empty(hidden) if config.mlp_bias else None,
        )

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)
