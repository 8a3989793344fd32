"""Models of Hugging Face transformers whose norms, gated units, rotation and loss run by tilewise."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from torch.func import functional_call

from tilewise.adapters.transformers import Fused, fuse, unfuse
from tilewise.core.errors import InputError
from tilewise.ops.operation import Operation
from tilewise.testing import operators

CONFIG = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
NORMS = {"Llama": 5, "Mistral": 5, "Qwen2": 5, "Qwen3": 9, "Gemma2": 9}
DTYPES = (torch.float32, torch.bfloat16)
SWITCHES = ("norms", "activations", "rotary", "loss")


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny random model; the same weights for a name."""
    config = getattr(transformers, f"{name}Config")(**{**CONFIG, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 97, (2, 11), generator=torch.Generator().manual_seed(seed))


def labels(seed: int = 2) -> torch.Tensor:
    found = tokens(seed)
    found[1, :4] = -100
    return found


def in_double(function: Callable[..., Any], **parameters: torch.Tensor) -> Any:
    """Of float64 nothing is narrowed to float32 on the way, as transformers does it in norms, softmax and loss."""
    if next(iter(parameters.values())).dtype != torch.float64:
        return function(**parameters)
    narrow = torch.Tensor.float
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x))
        return function(**parameters)


def compare(model: Any, of: Callable[[Any], torch.Tensor], *batches: dict[str, torch.Tensor]) -> None:
    """Outputs and gradients of all parameters: error against float64 within twice that of the model unfused."""
    plain = copy.deepcopy(model)
    unfuse(plain)

    def run(which: Any) -> Callable[..., torch.Tensor]:
        return lambda **parameters: torch.stack([of(functional_call(which, parameters, kwargs=x)) for x in batches])

    parameters = dict(model.named_parameters())
    operators.check(run(model), lambda **given: in_double(run(plain), **given), parameters)


def compare_losses(model: Any) -> None:
    """Of several batches: rounding may leave one number closer to the truth than its terms are."""
    batches = [{"input_ids": tokens(n), "labels": labels(n)} for n in range(8)]
    compare(model, lambda output: output.loss, *batches)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_logits_and_gradients(name: str, dtype: torch.dtype) -> None:
    model = make(name, dtype)
    layers = {f"{name}MLP": 2, f"{name}Attention": 2, f"{name}ForCausalLM": 1}
    assert fuse(model) == Fused({f"{name}RMSNorm": NORMS[name], **layers}, {})
    padding = torch.ones_like(tokens())
    padding[1, :4] = 0
    compare(model, lambda output: output.logits[:, 4:], {"input_ids": tokens(), "attention_mask": padding})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_loss_and_gradients(name: str, dtype: torch.dtype) -> None:
    model = make(name, dtype).train()
    fuse(model)
    compare_losses(model)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_one_kind_alone(name: str, switch: str) -> None:
    model = make(name, torch.bfloat16).train()
    kind = {"norms": "RMSNorm", "activations": "MLP", "rotary": "Attention", "loss": "ForCausalLM"}[switch]
    found = fuse(model, **{other: other == switch for other in SWITCHES})
    assert list(found.replaced) == [name + kind]
    compare_losses(model)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_activations(act: str) -> None:
    model = make("Llama", hidden_act=act)
    assert fuse(model).replaced["LlamaMLP"] == 2
    compare(model, lambda output: output.logits, {"input_ids": tokens()})


@pytest.mark.parametrize("name", NORMS)
def test_generate(name: str) -> None:
    model = make(name)
    options = {"max_new_tokens": 8, "do_sample": False}
    padding = torch.ones_like(tokens())
    padding[1, :4] = 0
    before = model.generate(tokens(), attention_mask=padding, **options)
    fuse(model)
    assert torch.equal(model.generate(tokens(), attention_mask=padding, **options), before)


@pytest.mark.parametrize("name", NORMS)
def test_unfuse_restores_the_model(name: str) -> None:
    model = make(name).train()
    other = make(name)
    before, keys = model(tokens()).logits, set(model.state_dict())
    fuse(model)
    assert set(model.state_dict()) == keys
    assert not any("forward" in vars(module) for module in other.modules())
    unfuse(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(tokens()).logits, before)
    assert fuse(model).left == {}


def test_a_copy_is_fused_by_itself() -> None:
    model = make("Llama")
    fuse(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.norm.weight.zero_()
        assert not twin(tokens()).logits.any()
        assert model(tokens()).logits.any()
    unfuse(model)
    assert fuse(twin) == Fused({}, {"LlamaForCausalLM": 1, "LlamaAttention": 2, "LlamaMLP": 2, "LlamaRMSNorm": 5})


def test_the_loss_builds_no_logits_unless_they_are_asked_for() -> None:
    model = make("Llama").train()
    plain = model(tokens(), labels=labels())
    fuse(model)
    output = model(tokens(), labels=labels())
    assert output.logits is None
    torch.testing.assert_close(output.loss, plain.loss)
    (loss,) = model(tokens(), labels=labels(), return_dict=False, use_cache=False)
    assert torch.equal(loss, output.loss)
    assert len(model(tokens(), labels=labels(), output_hidden_states=True).hidden_states) == 3
    assert model(tokens()).logits.shape == (2, 11, 97)
    assert model(tokens(), labels=labels(), logits_to_keep=0).logits.shape == (2, 11, 97)
    assert model.eval()(tokens(), labels=labels()).logits.shape == (2, 11, 97)
    model.train().loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    assert model(tokens(), labels=labels()).logits.shape == (2, 11, 97)


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": 5},
        {"num_items_in_batch": torch.tensor(5)},
        {"ignore_index": 7},
        {"shift_labels": tokens(3)},
    ],
    ids=str,
)
def test_arguments_of_the_loss(options: dict[str, Any]) -> None:
    model = make("Llama").train()
    target = labels().clamp(min=0) if "ignore_index" in options else labels()
    plain = model(tokens(), labels=target, **options).loss
    fuse(model)
    torch.testing.assert_close(model(tokens(), labels=target, **options).loss, plain)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_autocast(name: str) -> None:
    model = make(name).train()
    with torch.autocast("cpu", torch.bfloat16):
        before = model(tokens(), labels=labels()).loss
        fuse(model)
        after = model(tokens(), labels=labels()).loss
    assert after.dtype == before.dtype
    torch.testing.assert_close(after, before, rtol=1e-2, atol=0)


def test_norms_of_another_dtype_than_the_model() -> None:
    model = make("Llama", torch.bfloat16)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    norm = model.model.norm.float()
    before, wide = norm(x), norm.to(torch.bfloat16)(x.float())
    fuse(model, activations=False, rotary=False, loss=False)
    for found, expected in ((norm.float()(x), before), (norm.to(torch.bfloat16)(x.float()), wide)):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_what_computes_something_else_is_left() -> None:
    class DoubledRMSNorm(type(make("Llama").model.norm)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().forward(hidden_states)

    model = make("Llama", hidden_act="quick_gelu")
    model.model.norm = DoubledRMSNorm(32)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    before = model(tokens()).logits
    found = fuse(model)
    assert found.replaced == {"LlamaAttention": 2, "LlamaRMSNorm": 4}
    assert found.left == {"LlamaForCausalLM": 1, "LlamaMLP": 2, "DoubledRMSNorm": 1}
    torch.testing.assert_close(model(tokens()).logits, before)


def with_rotary(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A model whose cosines and sines are changed."""
    model = make("Llama")

    class OtherRotaryEmbedding(type(model.model.rotary_emb)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = super().forward(x, position_ids)
            return change(cos), change(sin)

    model.model.rotary_emb = OtherRotaryEmbedding(model.config)
    return model


def test_rotary_embeddings_of_another_kind_are_left() -> None:
    model = with_rotary(lambda angles: angles.chunk(2, -1)[0].repeat_interleave(2, -1))
    before = model(tokens()).logits
    assert fuse(model).left == {"LlamaAttention": 2}
    torch.testing.assert_close(model(tokens()).logits, before)


def test_rotary_embeddings_of_other_code_but_angles_given_twice() -> None:
    model = with_rotary(lambda angles: angles.chunk(2, -1)[0].roll(1, -1).repeat(1, 1, 2))
    before = model(tokens()).logits
    assert fuse(model).left == {}
    torch.testing.assert_close(model(tokens()).logits, before)


def test_nothing_to_replace() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.RMSNorm(3))
    assert fuse(model).replaced == {}
    unfuse(model)


def test_arguments() -> None:
    with pytest.raises(InputError, match="model: got str"):
        fuse("Llama")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="attention"):
        fuse(make("Llama"), attention=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(("name", "dynamic"), [("Llama", True), ("Gemma2", False)])
def test_compiles_whole(name: str, dynamic: bool) -> None:
    model = make(name, num_hidden_layers=1).train()
    fuse(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    inputs = {"input_ids": tokens(), "use_cache": False}
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)
    losses = [which(**inputs, labels=labels()).loss for which in (compiled, model)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, model.model.norm.weight) for loss in losses))


def test_gradient_checkpointing() -> None:
    model = make("Llama").train()
    inputs = {"input_ids": tokens(), "labels": labels(), "use_cache": False}
    weight = model.model.layers[0].mlp.gate_proj.weight
    before = torch.autograd.grad(model(**inputs).loss, weight)
    model.gradient_checkpointing_enable()
    fuse(model)
    torch.testing.assert_close(torch.autograd.grad(model(**inputs).loss, weight), before)


def test_every_operation_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    call = Operation.__call__

    def counted(self: Operation[Any], *args: Any) -> Any:
        seen[self.name] += 1
        return call(self, *args)

    monkeypatch.setattr(Operation, "__call__", counted)
    model = make("Llama").train()
    model(tokens(), labels=labels())
    assert not seen
    fuse(model)
    model(tokens(), labels=labels())
    assert seen == {"norm": 5, "glu": 2, "rope": 2, "linear_cross_entropy": 1}
