"""A fused model whose modules are wrapped, hooked, replaced or patched later computes what the model itself does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.adapters.test_transformers_fused import labels, make, tokens
from tilewise.adapters.transformers import fuse, unfuse


class LoRA(torch.nn.Module):
    """A linear layer with an adapter beside it; `weight` is the layer's, as PEFT's is."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(3)
        self.down = torch.nn.Parameter(torch.randn(4, base.in_features, generator=generator))
        self.up = torch.nn.Parameter(torch.randn(base.out_features, 4, generator=generator))

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.mT @ self.up.mT


class Doubled(torch.nn.Module):
    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _twice(self.base(*args, **kwargs))


class Scaled(torch.nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 1.5 * weight


def _twice(x: Any) -> Any:
    return tuple(map(_twice, x)) if isinstance(x, tuple) else x * 2 if isinstance(x, torch.Tensor) else x


def _after(module: torch.nn.Module, args: Any, output: Any) -> Any:
    return _twice(output)


def _uneven(module: torch.nn.Module, args: Any, output: Any) -> Any:
    return tuple(x * torch.linspace(0.5, 1.5, x.shape[-1]) for x in output)


def _before(module: torch.nn.Module, args: Any) -> Any:
    return _twice(args)


def _of_gradients(module: torch.nn.Module, grads: Any, outputs: Any) -> Any:
    return _twice(grads)


def _with_bias(model: Any) -> None:
    head = model.lm_head
    made = torch.nn.Linear(head.in_features, head.out_features)
    made.weight, made.bias = head.weight, torch.nn.Parameter(torch.linspace(-2, 2, head.out_features))
    model.lm_head = made


def _own_forward(module: Any) -> None:
    known = module.forward
    module.forward = lambda *args, **kwargs: _twice(known(*args, **kwargs))


def _wrap(parent: Any, name: str, wrapper: Callable[[Any], torch.nn.Module]) -> None:
    setattr(parent, name, wrapper(getattr(parent, name)))


CHANGES: dict[str, Callable[[Any], object]] = {
    "lm_head in LoRA": lambda m: _wrap(m, "lm_head", LoRA),
    "lm_head with a bias": _with_bias,
    "lm_head's bias set": lambda m: setattr(m.lm_head, "bias", torch.nn.Parameter(torch.linspace(-2, 2, 97))),
    "lm_head hooked": lambda m: m.lm_head.register_forward_hook(_after),
    "lm_head hooked before": lambda m: m.lm_head.register_forward_pre_hook(_before),
    "lm_head's gradients hooked": lambda m: m.lm_head.register_full_backward_hook(_of_gradients),
    "lm_head's own forward": lambda m: _own_forward(m.lm_head),
    "lm_head parametrized": lambda m: torch.nn.utils.parametrize.register_parametrization(
        m.lm_head, "weight", Scaled()
    ),
    "all modules hooked": lambda m: torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: _twice(output) if module is m.lm_head else None
    ),
    "the model hooked": lambda m: m.model.register_forward_hook(
        lambda module, args, output: output.__class__(last_hidden_state=_twice(output.last_hidden_state))
    ),
    "an activation hooked": lambda m: m.model.layers[0].mlp.act_fn.register_forward_hook(_after),
    "an activation replaced": lambda m: setattr(m.model.layers[0].mlp, "act_fn", torch.nn.Tanh()),
    "an activation's own forward": lambda m: _own_forward(m.model.layers[1].mlp.act_fn),
    "an activation wrapped": lambda m: _wrap(m.model.layers[0].mlp, "act_fn", Doubled),
    "a projection in LoRA": lambda m: _wrap(m.model.layers[0].mlp, "gate_proj", LoRA),
    "a unit hooked": lambda m: m.model.layers[0].mlp.register_forward_hook(_after),
    "a unit wrapped": lambda m: _wrap(m.model.layers[0], "mlp", Doubled),
    "a norm hooked": lambda m: m.model.norm.register_forward_hook(_after),
    "a norm wrapped": lambda m: _wrap(m.model, "norm", Doubled),
    "a norm parametrized": lambda m: torch.nn.utils.parametrize.register_parametrization(
        m.model.norm, "weight", Scaled()
    ),
    "a norm of another class": lambda m: setattr(m.model.norm, "__class__", _half(type(m.model.norm))),
    "attention hooked": lambda m: m.model.layers[0].self_attn.register_forward_hook(_after),
    "queries in LoRA": lambda m: _wrap(m.model.layers[0].self_attn, "q_proj", LoRA),
    "the rotary embedding hooked": lambda m: m.model.rotary_emb.register_forward_hook(_uneven),
    "the rotary embedding wrapped": lambda m: _wrap(m.model, "rotary_emb", Doubled),
    "the rotary embedding's own forward": lambda m: _own_forward(m.model.rotary_emb),
}


def _half(kind: Any) -> type:
    return type(kind.__name__, (kind,), {"forward": lambda self, x: 0.5 * kind.forward(self, x)})


def outcome(model: Any) -> dict[str, torch.Tensor]:
    """The loss, logits where there are some, and gradients by the names that parameters have without wrappers."""
    model.train()
    model.zero_grad()
    found = model(input_ids=tokens(), labels=labels())
    found.loss.backward()
    grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens()).logits
    return {"loss": found.loss.detach(), "logits": logits, **grads}


@pytest.mark.parametrize("name", CHANGES)
def test_what_comes_later_is_not_gone_past(name: str) -> None:
    plain = make("Llama")
    fused = copy.deepcopy(plain)
    fuse(fused)
    before = outcome(plain)
    undo = [CHANGES[name](plain), CHANGES[name](fused)]
    try:
        want, got = outcome(plain), outcome(fused)
        unfuse(fused)
        back = outcome(fused)
    finally:
        if name == "all modules hooked":
            for handle in undo:
                handle.remove()  # type: ignore[attr-defined]
    assert want.keys() == got.keys()
    # the change is one that shows
    assert any(not torch.allclose(want[key], before[key], rtol=1e-2) for key in before.keys() & want.keys())
    for key, x in want.items():
        torch.testing.assert_close(got[key], x, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
        torch.testing.assert_close(back[key], x, rtol=1e-4, atol=1e-5)


def test_functions_of_transformers_patched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama as llama

    plain = make("Llama")
    fused = copy.deepcopy(plain)
    fuse(fused)
    rotate, norm, unit = llama.apply_rotary_pos_emb, llama.LlamaRMSNorm.forward, llama.LlamaMLP.forward
    for owner, attribute, patch in (
        (llama, "apply_rotary_pos_emb", lambda *args, **kwargs: _twice(rotate(*args, **kwargs))),
        (
            llama,
            "eager_attention_forward",
            lambda module, q, k, v, *_, **__: (v.repeat(1, 2, 1, 1).mT.mT.transpose(1, 2), None),
        ),
        (llama.LlamaRMSNorm, "forward", lambda self, x: 2 * norm(self, x)),
        (llama.LlamaMLP, "forward", lambda self, x: 2 * unit(self, x)),
        (torch.nn.Linear, "forward", lambda self, x: 2 * torch.nn.functional.linear(x, self.weight, self.bias)),
        (torch.nn.SiLU, "forward", lambda self, x: torch.tanh(x)),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, attribute, patch)
            want, got = outcome(plain), outcome(fused)
        for key, x in want.items():
            torch.testing.assert_close(got[key], x, rtol=1e-4, atol=1e-5, msg=lambda text, a=attribute: f"{a}: {text}")


def test_nothing_changed_runs_by_tilewise() -> None:
    model = make("Llama")
    fuse(model)
    model.train()
    assert model(input_ids=tokens(), labels=labels()).logits is None
    handle = model.lm_head.register_forward_hook(_after)
    assert model(input_ids=tokens(), labels=labels()).logits is not None
    handle.remove()
    assert model(input_ids=tokens(), labels=labels()).logits is None


def test_unfusing_leaves_nothing() -> None:
    model = make("Llama")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    fuse(model)
    unfuse(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
