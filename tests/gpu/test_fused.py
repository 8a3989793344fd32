"""A model of transformers whose norms, gated units, rotation and loss are tilewise's, on a GPU."""

from __future__ import annotations

import torch
import transformers

from tests.gpu.matrix import DEVICE
from tilewise.adapters.transformers import fuse, unfuse


def test_loss_and_gradients() -> None:
    """Loss and gradients: error against float32 within twice that of the model unfused."""
    config = transformers.Qwen3Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(DEVICE).train()
    tokens = torch.randint(0, 1000, (4, 90), device=DEVICE)

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        loss = model.to(dtype)(tokens, labels=tokens).loss
        return [loss.float(), *(x.float() for x in torch.autograd.grad(loss, list(model.parameters())))]

    truth, plain = run(torch.float32), run(torch.bfloat16)
    assert fuse(model).left == {}
    fused = run(torch.bfloat16)
    unfuse(model)
    for found, unfused, expected in zip(fused, plain, truth, strict=True):
        allowed = 2.0 * (unfused - expected).abs().max() + torch.finfo(torch.bfloat16).eps * expected.abs().max()
        assert (found - expected).abs().max() <= allowed
