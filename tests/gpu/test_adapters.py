"""The adapters on a GPU: each one's call reaches the Triton rows and agrees with PyTorch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.gpu import draws
from tests.gpu.matrix import DEVICE
from tilewise.adapters import flash_attn, flex, sageattention, sdpa


def draw(*shape: int, seed: int) -> torch.Tensor:
    return draws.draw(*shape, seed=seed).requires_grad_()


def assert_like(got: torch.Tensor, want: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Outputs and gradients agree to bfloat16."""
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    ours, theirs = (torch.autograd.grad(o.float().square().sum(), inputs) for o in (got, want))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


def heads_first(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in inputs]


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn(causal: bool) -> None:
    inputs = [draw(2, 150, heads, 64, seed=n) for n, heads in enumerate((4, 2, 2))]
    want = F.scaled_dot_product_attention(*heads_first(inputs), is_causal=causal, enable_gqa=True).transpose(1, 2)
    assert_like(flash_attn.flash_attn_func(*inputs, causal=causal), want, inputs)


def test_flash_attn_varlen() -> None:
    inputs = [draw(200, 2, 64, seed=n) for n in range(3)]
    cu = torch.tensor([0, 60, 200], dtype=torch.int32, device=DEVICE)
    got = flash_attn.flash_attn_varlen_func(*inputs, cu, cu, 140, 140, causal=True)
    parts = [heads_first([x[None, a:b] for x in inputs]) for a, b in ((0, 60), (60, 200))]
    want = torch.cat([F.scaled_dot_product_attention(*part, is_causal=True)[0].transpose(0, 1) for part in parts])
    assert_like(got, want, inputs)


def test_sdpa_with_a_boolean_mask() -> None:
    inputs = [draw(2, 4, 130, 64, seed=n) for n in range(3)]
    keep = torch.rand(2, 1, 130, 130, device=DEVICE) < 0.5
    keep[..., 0] = True
    want = F.scaled_dot_product_attention(*inputs, attn_mask=keep)
    assert_like(sdpa.scaled_dot_product_attention(*inputs, attn_mask=keep), want, inputs)


@pytest.mark.parametrize("causal", [False, True])
def test_sageattn(causal: bool) -> None:
    """Weights in FP8 are off by up to 1 / 16, so results by some percent of their sum."""
    inputs = [draw(2, 4, 300, 64, seed=n).detach() for n in range(3)]
    o, lse = sageattention.sageattn(*inputs, is_causal=causal, return_lse=True)
    want = F.scaled_dot_product_attention(*inputs, is_causal=causal)
    assert float((o - want).float().abs().sum()) < 0.06 * float(want.float().abs().sum())
    assert lse.shape == (2, 4, 300)


def test_flex() -> None:
    inputs = [draw(2, 4, 256, 64, seed=n) for n in range(3)]

    def near(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q >= k) & (q - k < 70)

    def further(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return s - 0.1 * (q - k)

    block_mask = flex.create_block_mask(near, 2, 4, 256, 256, device=DEVICE)
    got = flex.flex_attention(*inputs, score_mod=further, block_mask=block_mask)
    q = torch.arange(256, device=DEVICE)[:, None]
    k = torch.arange(256, device=DEVICE)
    bias = torch.where((q >= k) & (q - k < 70), -0.1 * (q - k), -torch.inf).to(torch.bfloat16)
    want = F.scaled_dot_product_attention(*inputs, attn_mask=bias)
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


def test_transformers() -> None:
    import transformers

    from tilewise.adapters.transformers import register

    register()
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    tokens = torch.randint(0, 100, (2, 90), device=DEVICE)
    logits = []
    for name in ("eager", "tilewise"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits.append(model(tokens).logits.float())
    torch.testing.assert_close(logits[1], logits[0], rtol=5e-2, atol=5e-2)
