"""Models of Hugging Face transformers through attn_implementation="tilewise", against their eager attention."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.masking_utils import sdpa_mask

import tilewise as tw
from tests.adapters.dense import assert_close, dense, leaves
from tilewise.adapters import flex, sdpa
from tilewise.adapters import transformers as adapter
from tilewise.core.errors import InputError, MissingExtraError, UnsupportedError

adapter.register()

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "GptOss": {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Mistral": {"sliding_window": 3, "num_key_value_heads": 1},
}
SIDES = ("none", "left", "right")


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny random model in float64 or float32; the same weights for a name."""
    config = getattr(transformers, f"{name}Config")(**{**BASE, **MODELS[name], **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():  # sharper scores than the initialisation's, so that a wrong mask shows
        if parameter.ndim == 2:
            parameter.data *= 8.0
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    if name == "GptOss":
        model.set_experts_implementation("eager")  # the grouped matmul has no float64
    return model.to(dtype).eval()


def batch(side: str, length: int = 11) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 97, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if side == "left":
        mask[1, :4] = 0
    if side == "right":
        mask[1, -4:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def outputs(model: Any, implementation: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Logits at tokens that are not padding, and the gradient of every parameter."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(**inputs).logits
    if "attention_mask" in inputs and inputs["attention_mask"].ndim == 2:
        logits = logits * inputs["attention_mask"][..., None]
    logits.square().mean().backward()
    return {"logits": logits} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every call of tilewise.attention."""
    seen: list[dict[str, Any]] = []
    original = tw.attention

    def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.append({"q": tuple(q.shape), "k": tuple(k.shape), **kwargs})
        return original(q, k, v, **kwargs)

    monkeypatch.setattr(tw, "attention", counted)
    return seen


def compare(name: str, inputs: dict[str, torch.Tensor], **changes: Any) -> None:
    """Logits and gradients: error against eager attention in float64 within that of eager attention in float32."""
    model, wide = make(name, **changes), make(name, torch.float64, **changes)
    found, plain = (outputs(model, implementation, inputs) for implementation in ("tilewise", "eager"))
    with pytest.MonkeyPatch.context() as patch:
        softmax = F.softmax

        def in_double(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
            return softmax(x, dim=dim, dtype=torch.float64 if x.dtype == torch.float64 else dtype)

        patch.setattr(F, "softmax", in_double)  # eager attention would narrow it to float32, where the mask overflows
        reference = outputs(wide, "eager", inputs)
    assert found.keys() == reference.keys()
    for key in found:
        assert_close(found[key], reference[key], plain[key], key)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str, side: str, calls: list[dict[str, Any]]) -> None:
    compare(name, batch(side))
    assert len(calls) == 2  # one for each layer
    assert all(call["k"] == (2, 11, BASE["num_key_value_heads"] if name != "Mistral" else 1, 8) for call in calls)
    assert all((call["sink"] is not None) == (name == "GptOss") for call in calls)
    assert all((call["score"] is not None) == (name == "Gemma2") for call in calls)


def test_an_unpadded_decoder_runs_plain_causal(calls: list[dict[str, Any]]) -> None:
    compare("Llama", batch("none"))
    assert [call["mask"].text for call in calls] == [tw.causal.text] * 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generation_with_a_cache(name: str, cache: str, calls: list[dict[str, Any]]) -> None:
    model, inputs = make(name), batch("left", 7)
    options: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    tokens = {}
    for implementation in ("eager", "tilewise"):
        model.set_attn_implementation(implementation)
        tokens[implementation] = model.generate(**inputs, max_new_tokens=9, do_sample=False, **options)
    assert torch.equal(tokens["eager"], tokens["tilewise"])
    assert tokens["eager"].shape == (2, 16)
    assert len({tuple(row) for row in tokens["eager"][:, 7:].tolist()}) == 2  # the rows do differ
    assert len(calls) == 2 * 9
    assert calls[-1]["q"][1] == 1


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_prompt_in_two_parts(name: str) -> None:
    """More keys than queries, and more than one query."""
    model, ids = make(name), batch("none")["input_ids"]
    logits = {}
    for implementation in ("eager", "tilewise"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            first = model(ids[:, :6], use_cache=True)
            logits[implementation] = model(ids[:, 6:], past_key_values=first.past_key_values).logits
            whole = model(ids).logits[:, 6:]
            torch.testing.assert_close(logits[implementation], whole, rtol=0, atol=2e-5)
    torch.testing.assert_close(logits["tilewise"], logits["eager"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_packed_sequences_by_position_ids(name: str) -> None:
    """Three sequences in one row equal the same sequences alone."""
    model, ids = make(name), batch("none", 12)["input_ids"][:1]
    model.set_attn_implementation("tilewise")
    lengths = (5, 1, 6)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)
        mixed = model(ids, use_cache=False).logits
    torch.testing.assert_close(packed, alone, rtol=0, atol=2e-5)
    assert float((packed - mixed).abs().max()) > 1e-2
    compare(name, {"input_ids": ids, "position_ids": positions, "use_cache": False})  # type: ignore[dict-item]


def test_packed_sequences_by_cu_seqlens() -> None:
    q, k, v = leaves((1, 4, 12, 8), (1, 2, 12, 8), (1, 2, 12, 8))
    cu = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    layer = torch.nn.Module()
    for causal in (True, False):
        o, _ = adapter.attention_forward(
            layer, q, k, v, None, is_causal=causal, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=6, max_length_k=6
        )
        parts = [
            adapter.attention_forward(layer, *(x[:, :, a:b] for x in (q, k, v)), None, is_causal=causal)[0]
            for a, b in ((0, 5), (5, 6), (6, 12))
        ]
        torch.testing.assert_close(o, torch.cat(parts, 1), rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="cu_seq_lens_q"):
        adapter.attention_forward(layer, q[:, :, :4], k, v, None, cu_seq_lens_q=cu)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_given_in_full(kind: str) -> None:
    """A user's own 4-D mask: causal with one key hidden from all queries but the first, batch by batch."""
    visible = torch.ones(11, 11, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    visible[0, 0, 4:, 3] = False
    mask = visible if kind == "bool" else torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    compare_mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    model, ids = make("Llama"), batch("none")["input_ids"]
    model.set_attn_implementation("tilewise")
    with torch.no_grad():
        found = model(ids, attention_mask=mask).logits
        model.set_attn_implementation("eager")
        expected, without = model(ids, attention_mask=compare_mask).logits, model(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert float((expected - without).abs().max()) > 1e-2


def test_a_row_hidden_by_the_most_negative_number_gives_zero() -> None:
    q, k, v = leaves((1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    visible = torch.ones(1, 1, 4, 6, dtype=torch.bool)
    visible[..., 2, :] = False
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    o, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, mask)
    assert_close(o.transpose(1, 2), dense(q.double(), k.double(), v.double(), visible)[0], dense(q, k, v, visible)[0])
    assert bool((o[:, 2] == 0).all())


def test_encoder_with_padding_and_pooled_gradients(calls: list[dict[str, Any]]) -> None:
    config = transformers.BertConfig(**{**BASE, "hidden_size": 32, "attention_probs_dropout_prob": 0.0})
    torch.manual_seed(0)
    model = transformers.BertModel._from_config(config, attn_implementation="eager").eval()
    for side in SIDES:
        inputs = batch(side)
        results = []
        for implementation in ("eager", "tilewise"):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            hidden = model(**inputs).last_hidden_state * inputs["attention_mask"][..., None]
            hidden.square().mean().backward()
            results.append([hidden, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        for ours, eager in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)
    assert [call["mask"] is None for call in calls] == [True, True, False, False, False, False]


def test_dropout_in_training_only(calls: list[dict[str, Any]]) -> None:
    model, inputs = make("Llama", attention_dropout=0.25), batch("none")
    model.set_attn_implementation("tilewise")
    model.train()
    torch.manual_seed(0)
    first, second = model(**inputs).logits, model(**inputs).logits
    torch.manual_seed(0)
    assert torch.equal(first, model(**inputs).logits)
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
    assert [call["dropout"] for call in calls] == [0.25] * 6 + [0.0] * 4


def test_position_bias_softcap_and_sinks_together() -> None:
    q, k, v, bias, sink = leaves((2, 4, 9, 8), (2, 2, 13, 8), (2, 2, 13, 8), (1, 4, 9, 13), (4,))
    padding = torch.ones(2, 13, dtype=torch.bool)
    padding[1, :5] = False
    o, weights = adapter.attention_forward(
        torch.nn.Module(), q, k, v, padding, is_causal=False, softcap=1.5, s_aux=sink, position_bias=bias, scaling=0.4
    )
    assert weights is None

    def written_out(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v, bias, sink = tensors
        _, lse, p = dense(q, k, v, padding[:, None, None], lambda s: 1.5 * torch.tanh(s / 1.5) + bias, scale=0.4)
        share = torch.sigmoid(lse - sink[:, None])  # what the sink leaves of the probability
        return (p * share[..., None] @ v.repeat_interleave(2, 1)).transpose(1, 2)

    found = (o, *torch.autograd.grad(o.square().sum(), (q, k, v, bias, sink)))
    results = []
    for dtype in (torch.float64, torch.float32):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, bias, sink)]
        out = written_out(*inputs)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for x, exact, same in zip(found, *results, strict=True):
        assert_close(x, exact, same)


def test_without_a_prepared_mask_causal_is_pytorchs() -> None:
    """As transformers' own SDPA path: aligned to the top left, none for a single query."""
    layer = torch.nn.Module()
    layer.is_causal = True  # type: ignore[assignment]
    q, k, v = (x.detach() for x in leaves((1, 2, 5, 8), (1, 2, 9, 8), (1, 2, 9, 8)))
    for queries in (q, q[:, :, :1]):
        o, _ = adapter.attention_forward(layer, queries, k, v, None)
        expected = sdpa.scaled_dot_product_attention(queries, k, v, is_causal=queries.shape[2] > 1)
        assert torch.equal(o.transpose(1, 2), expected)


@pytest.mark.parametrize("offset", [0, 3, torch.tensor(3)], ids=["int 0", "int 3", "tensor 3"])
def test_masks_are_transformers_masks(offset: int | torch.Tensor) -> None:
    """Pair by pair, with offsets, padding and the mask functions that models add: no N x N tensor is made for it."""
    from transformers import masking_utils as m

    ids = torch.tensor([[0, 0, -1, 1, 1, 1, -1, -1, 2, 2, 2, -1], [-1] * 6 + [0] * 6])
    functions = {
        "causal": m.causal_mask_function,
        "sliding": m.sliding_window_causal_mask_function(3),
        "bidirectional sliding": m.sliding_window_bidirectional_mask_function(2),
        "chunked": m.chunked_causal_mask_function(4, torch.tensor([0, 2])),
        "blocks": m.or_masks(m.causal_mask_function, m.blockwise_overlay(ids)),
        "bidirectional": m.bidirectional_mask_function,
    }
    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[1, :2] = False
    for name, function in functions.items():
        for given in (None, padding):
            sizes = {"batch_size": 2, "q_length": 5, "kv_length": 10, "q_offset": offset, "kv_offset": 2}
            mine = adapter.attention_mask(**sizes, mask_function=function, attention_mask=given)
            assert isinstance(mine, flex.BlockMask)
            wanted = sdpa_mask(**sizes, mask_function=function, attention_mask=given, allow_is_causal_skip=False)
            places = (torch.arange(2), torch.arange(1), torch.arange(5, 10), torch.arange(10))
            grid = [x.reshape([-1 if dim == at else 1 for dim in range(4)]) for at, x in enumerate(places)]
            mask = mine.mask_for(5, 10)
            values = torch.tensor(True) if mask is None else mask.evaluate(**dict(zip("bhij", grid, strict=True)))
            assert torch.equal(values.expand(2, 1, 5, 10), wanted), (name, given is None)


def test_a_mask_function_that_cannot_be_traced_is_built_in_full() -> None:
    def stubborn(b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.sin(q * k) > torch.cumsum(k, -1) * 0

    with pytest.warns(UserWarning, match="built in full"):
        mask = adapter.attention_mask(2, 5, 5, mask_function=stubborn)
    assert mask.shape == (2, 1, 5, 5)
    assert mask.dtype == torch.bool


@pytest.mark.parametrize("name", ["cache", "indices", "block_indices", "sinks"])
def test_what_would_change_the_result_if_ignored_is_refused(name: str) -> None:
    q, k, v = leaves((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    with pytest.raises(UnsupportedError, match=name):
        adapter.attention_forward(torch.nn.Module(), q, k, v, None, **{name: torch.zeros(1)})


def test_a_prepared_mask_gives_some_of_its_queries() -> None:
    whole = adapter.attention_mask(
        2, 5, 10, q_offset=5, attention_mask=torch.tensor([[True] * 10, [False] + [True] * 9])
    )
    assert whole.ndim == 4
    place = {"b": torch.arange(2)[:, None, None, None], "h": torch.tensor(0), "j": torch.arange(10)}
    every = whole.mask_for(5, 10).evaluate(i=torch.arange(5, 10)[:, None], **place)
    for queries in (slice(-1, None), slice(0, None), slice(1, 3)):
        part = whole[:, :, queries, :]
        first, last, _ = queries.indices(5)
        assert part.shape == (2, 1, last - first, 10)
        rows = torch.arange(10 - (last - first), 10)[:, None]
        assert torch.equal(part.mask_for(last - first, 10).evaluate(i=rows, **place), every[:, :, queries])
    with pytest.raises(UnsupportedError, match="adds masks to its scores"):
        torch.zeros(2, 1, 5, 10) + whole


def test_layers_that_share_keys_and_values() -> None:
    """Gemma 4's last layers run on the last queries alone while a prompt is read, with a slice of the mask."""
    types = ["sliding_attention", "full_attention"] * 2
    sizes = {**BASE, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 97}
    config = transformers.Gemma4TextConfig(**sizes, sliding_window=4, layer_types=types)
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM._from_config(config, attn_implementation="eager").eval()
    inputs, found = batch("left", 9), []
    for implementation in ("tilewise", "eager"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0))
    assert torch.equal(*found)


def test_register_needs_a_transformers_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(batch_size: int, cache_position: torch.Tensor) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr("transformers.masking_utils.sdpa_mask", older)
        with pytest.raises(MissingExtraError, match="older"):
            adapter.register()
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    with pytest.raises(MissingExtraError, match="hf"):
        adapter.register()


def test_register_under_another_name() -> None:
    adapter.register("another_name")
    model = make("Llama")
    model.set_attn_implementation("another_name")
    assert model.config._attn_implementation == "another_name"
    with torch.no_grad():
        named = model(**batch("left")).logits
        model.set_attn_implementation("tilewise")
        assert torch.equal(named, model(**batch("left")).logits)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a")
def test_a_compiled_model_has_no_graph_break() -> None:
    model, inputs = make("Llama", num_hidden_layers=1), batch("left")
    model.set_attn_implementation("tilewise")
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")(**inputs, use_cache=False).logits
        torch.testing.assert_close(compiled, model(**inputs, use_cache=False).logits, rtol=0, atol=1e-5)
