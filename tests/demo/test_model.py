"""The demo's model is Llama, its cache changes nothing, and what it generates obeys the options."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise.demo.model import Cache, Llama, ModelConfig, generate
from tilewise.demo.operators import TORCH_OPERATORS, Operators, tilewise_operators

CONFIG = ModelConfig(vocab_size=97, dim=32, num_layers=2, num_heads_q=4, num_heads_kv=2, hidden=48, seqlen=24)


def model(config: ModelConfig = CONFIG, seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    return Llama(config, tilewise_operators())


def tokens(seqlen: int = 24, batch: int = 2) -> torch.Tensor:
    return torch.randint(97, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def test_it_is_llama() -> None:
    import transformers

    ours = model()
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    state = {"model.embed_tokens.weight": ours.embedding.weight, "model.norm.weight": ours.norm.weight}
    state["lm_head.weight"] = ours.embedding.weight
    for n, block in enumerate(ours.blocks):
        q, k, v = torch.split(block.attention.qkv.weight, [32, 16, 16])
        gate, up = block.mlp.gate_up.weight.chunk(2)
        attention = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": block.attention.out.weight}
        mlp = {"gate_proj": gate, "up_proj": up, "down_proj": block.mlp.down.weight}
        state |= {f"model.layers.{n}.self_attn.{name}.weight": w for name, w in attention.items()}
        state |= {f"model.layers.{n}.mlp.{name}.weight": w for name, w in mlp.items()}
        state[f"model.layers.{n}.input_layernorm.weight"] = block.norm_attention.weight
        state[f"model.layers.{n}.post_attention_layernorm.weight"] = block.norm_mlp.weight
    theirs.load_state_dict(state)
    for weight in ours.parameters():
        weight.data.mul_(1.5)  # far enough from the start for attention to matter
    theirs.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operators", [tilewise_operators(), TORCH_OPERATORS], ids=["tilewise", "torch"])
def test_rope_turns_scores_by_the_distance_alone(operators: Operators) -> None:
    cos, sin = (table.double() for table in tilewise.rope_tables(16, 64))
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)).double()

    def score(i: int, j: int) -> float:
        x = torch.stack((q, k)).view(2, 1, 1, 16)  # a token each
        turned, _, _ = operators.rotate(x.repeat(1, 1, 3, 1), 1, 1, tilewise.Rope(cos, sin, torch.tensor([i, j])))
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(60, 56), abs=1e-5)
    assert score(5, 5) == pytest.approx(float(q @ k), abs=1e-5)
    assert abs(score(7, 3) - score(33, 3)) > 1e-3


def test_no_logit_depends_on_later_tokens() -> None:
    ours, x = model(), tokens()
    changed = x.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 97
    with torch.no_grad():
        a, b = ours(x), ours(changed)
    torch.testing.assert_close(a[:, :10], b[:, :10], rtol=0, atol=1e-6)
    assert (a[:, 10:] - b[:, 10:]).abs().max() > 1e-3


@pytest.mark.parametrize("pieces", [[24], [1] * 24, [10, 1, 5, 8]])
def test_the_cache_gives_the_same_logits(pieces: list[int]) -> None:
    ours, x = model(), tokens()
    cache = Cache(CONFIG.num_layers)
    with torch.no_grad():
        parts = [ours(part, cache) for part in torch.split(x, pieces, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), ours(x), rtol=1e-4, atol=1e-5)
    assert cache.seqlen == 24


def test_gradients_through_both_sets_of_operators_agree() -> None:
    grads = []
    for operators in (tilewise_operators("cpu_tiled"), TORCH_OPERATORS):
        torch.manual_seed(0)
        ours = Llama(CONFIG, operators)
        ours.loss(tokens(), tokens().roll(-1, 1)).backward()
        grads.append({name: p.grad for name, p in ours.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-6, msg=name)


def test_generation_repeats_with_its_seed_and_stays_within_the_model() -> None:
    ours = model()
    options = {"max_new_tokens": 50, "temperature": 1.0, "top_k": 50}
    a, b, c = (generate(ours, [1, 2, 3], seed=seed, **options) for seed in (0, 0, 1))
    assert a == b != c
    assert a[:3] == [1, 2, 3]
    assert len(a) == CONFIG.seqlen


def test_temperature_zero_takes_the_likeliest_token_of_a_full_pass() -> None:
    ours = model()
    out = generate(ours, [5], max_new_tokens=8, temperature=0.0, top_k=1, seed=0)
    with torch.no_grad():
        for n in range(1, len(out)):
            assert out[n] == int(ours(torch.tensor([out[:n]]))[0, -1].argmax())
    assert generate(ours, [5], max_new_tokens=8, temperature=1.0, top_k=1, seed=3) == out


def test_generation_ends_at_the_stop_token_and_long_prompts_keep_their_end() -> None:
    ours = model()
    out = generate(ours, [5], max_new_tokens=8, temperature=0.0, top_k=1, seed=0)
    assert generate(ours, [5], max_new_tokens=8, temperature=0.0, top_k=1, seed=0, stop=out[1]) == [5]
    long = list(range(60))
    assert generate(ours, long, max_new_tokens=8, temperature=0.0, top_k=1, seed=0)[:-1] == long[-23:]
