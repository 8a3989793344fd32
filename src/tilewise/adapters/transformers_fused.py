"""Fused layers for models of Hugging Face transformers: `fuse(model)` replaces norms, gated units, RoPE and loss.

A module is recognised by its class's code, not by its name: the bytecode must equal that of Llama or Gemma 2 in the
installed transformers. Many decoders share that code.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as _of_all

import tilewise as tw
from tilewise.adapters.axes import autocast
from tilewise.core.errors import InputError
from tilewise.core.flags import check_flags
from tilewise.core.optional import importing

__all__ = ["Fused", "fuse", "unfuse"]

Forward = Callable[..., Any]
Holds = Callable[[Any], bool]
_ROTATE = "apply_rotary_pos_emb"
_LINEAR = torch.nn.Linear.forward
_MARK = "_by_tilewise"
_PLACES = "_rotary_by_tilewise"


class Fused(NamedTuple):
    """How many modules of each class `fuse` replaced, and how many candidates it left unchanged.

    Attributes:
        replaced: numbers of modules that now run by tilewise, by the name of their class.
        left: numbers of candidates that compute something else, likewise.

    Example:
        >>> from tilewise.adapters.transformers_fused import Fused
        >>> Fused({"LlamaMLP": 2}, {}).replaced
        {'LlamaMLP': 2}
    """

    replaced: dict[str, int]
    left: dict[str, int]


def fuse(
    model: torch.nn.Module, *, norms: bool = True, activations: bool = True, rotary: bool = True, loss: bool = True
) -> Fused:
    """Run the norms, gated units, rotary embeddings and loss of this model by tilewise, until `unfuse(model)`.

    Modules get a new `forward`; classes, parameters and `state_dict` stay. Candidates are modules whose class names end
    as below. A candidate is left unchanged if it computes anything else than Llama's or Gemma's, or has a `forward` of
    its own already: fused before, or spread over devices by accelerate. Do not pickle a fused model as a whole.

    A fused `forward` may bypass modules that it would have called: lm_head (LoRA, a bias), activations, rotary
    embeddings. In each call it checks that these, and the functions of transformers, were not wrapped, replaced or
    hooked since, and otherwise runs the model's own code. Hooks and wrappers of the replaced modules work as before.

    Args:
        model: a module that holds modules of transformers.
        norms: of "RMSNorm" by `tilewise.rms_norm`, which rounds once where Llama's rounds before the weight too.
        activations: act_fn(gate_proj(x)) * up_proj(x), of "MLP", by `tilewise.swiglu`, `geglu` or `reglu`.
        rotary: apply_rotary_pos_emb, of "Attention", by `tilewise.rope`, where every rotary embedding of the model
            gives its angles twice, as Llama's does.
        loss: of "ForCausalLM" by `tilewise.linear_cross_entropy`. In training, with `labels=` and without
            `logits_to_keep=`, logits are not computed, and are None in the output. Otherwise, and with a loss function
            that is not transformers' own, nothing changes.

    Returns:
        A `Fused`: what was replaced and what was left.

    Raises:
        InputError: `model` is no module.
        MissingExtraError: transformers is not installed.

    Example:
        >>> from tilewise.adapters import transformers as adapter
        >>> adapter.fuse(torch.nn.Linear(2, 2))  # a model of transformers
        Fused(replaced={}, left={})
    """
    check_flags(norms=norms, activations=activations, rotary=rotary, loss=loss)
    if not isinstance(model, torch.nn.Module):
        raise InputError("model", got=type(model).__name__, expected="a torch.nn.Module", hint="load the model first")
    places = _places(model)
    finders: tuple[tuple[bool, str, Callable[[Any], Forward | None]], ...] = (
        (norms, "RMSNorm", _norm),
        (activations, "MLP", _gated),
        (rotary, "Attention", functools.partial(_rotated, places if _angles_twice(model) else [])),
        (loss, "ForCausalLM", _loss),
    )
    replaced: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for module in model.modules():
        name = type(module).__name__
        for wanted, ending, find in finders:
            if not wanted or not name.endswith(ending):
                continue
            forward = None if "forward" in vars(module) else find(module)
            if forward is None:
                left[name] += 1
                continue
            setattr(forward, _MARK, True)
            if ending == "Attention":
                setattr(module, _PLACES, places)
            module.forward = types.MethodType(forward, module)
            replaced[name] += 1
    return Fused(dict(replaced), dict(left))


def unfuse(model: torch.nn.Module) -> None:
    """Undo `fuse`: its modules run the code of their classes again.

    Args:
        model: a fused model; another one stays as it is.

    Example:
        >>> from tilewise.adapters import transformers as adapter
        >>> adapter.unfuse(torch.nn.Linear(2, 2))
    """
    for module in model.modules():
        if hasattr(vars(module).get("forward"), _MARK):
            del module.forward
            vars(module).pop(_PLACES, None)


# what is recognised --------------------------------------------------------------------------------------------------


@functools.cache
def _known() -> Any:
    """What recognised code equals."""
    with importing("transformers>=5.4", "hf", name="fuse"):
        from transformers.activations import ACT2FN
        from transformers.loss.loss_utils import ForCausalLMLoss
        from transformers.modeling_outputs import CausalLMOutputWithPast
        from transformers.models.gemma2 import modeling_gemma2 as gemma
        from transformers.models.llama import modeling_llama as llama
        from transformers.utils import can_return_tuple
    units = {
        "silu": tw.swiglu,
        "swish": tw.swiglu,
        "gelu": tw.geglu,
        "gelu_pytorch_tanh": functools.partial(tw.geglu, approximate="tanh"),
        "relu": tw.reglu,
    }
    return types.SimpleNamespace(
        llama=llama,
        gemma=gemma,
        units={type(ACT2FN[name]): unit for name, unit in units.items()},
        loss=ForCausalLMLoss,
        output=CausalLMOutputWithPast,
        can_return_tuple=can_return_tuple,
    )


def _same(one: Any, other: Any) -> bool:
    """Whether two functions compute the same: names of arguments, annotations and docstrings may differ."""
    mine = _instructions(one)
    return bool(mine) and mine == _instructions(other)


def _instructions(function: Any) -> list[Any]:
    """Of a function and of those that it decorates; nothing for what is no function."""
    found = []
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None:
            return []
        constants = [x for x in code.co_consts if not isinstance(x, str)]  # a docstring is one
        found.append((code.co_code, code.co_names, constants))
        function = getattr(function, "__wrapped__", None)
    return found


def _angles_twice(model: torch.nn.Module) -> bool:
    """Whether cosines and sines have two equal halves in all rotary embeddings, of which there is one at least."""
    found = [x for x in model.modules() if type(x).__name__.endswith("RotaryEmbedding")]
    return bool(found) and all(_gives_twice(x) for x in found)


def _gives_twice(embedding: torch.nn.Module) -> bool:
    """By its code, which is Llama's, or by what it gives for a few positions."""
    if _same(type(embedding).forward, _known().llama.LlamaRotaryEmbedding.forward):
        return True
    device = next((x.device for x in embedding.buffers()), None)
    positions = torch.arange(4, device=device)[None]
    try:
        cos, sin = embedding(torch.zeros(1, 4, 1, device=device), positions)
        return all(torch.equal(*x.chunk(2, -1)) for x in (cos, sin))
    except (TypeError, ValueError, RuntimeError):  # it wants to be asked otherwise
        return False


def _norm(module: Any) -> Forward | None:
    known, kind = _known(), type(module)
    if _same(kind.forward, known.llama.LlamaRMSNorm.forward):
        return _while(kind.forward, _norm_forward)
    gemma = known.gemma.Gemma2RMSNorm
    if _same(kind.forward, gemma.forward) and _same(kind._norm, gemma._norm):
        norm = kind._norm
        return _while(kind.forward, _offset_norm_forward, lambda self: type(self)._norm is norm)
    return None


def _gated(module: Any) -> Forward | None:
    known, original = _known(), type(module).forward
    if not _same(original, known.llama.LlamaMLP.forward):
        return None
    kind = type(module.act_fn)
    unit, act = known.units.get(kind), kind.forward
    if unit is None:
        return None
    return _while(
        original, _gated_forward(unit), lambda self: type(self.act_fn) is kind and _untouched(self.act_fn, act)
    )


def _rotated(places: list[_Place], module: Any) -> Forward | None:
    llama, forward = _known().llama, type(module).forward
    if not places or _ROTATE not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return None
    rotate = forward.__globals__.get(_ROTATE)
    if not _same(rotate, llama.apply_rotary_pos_emb) or not _same(rotate.__globals__["rotate_half"], llama.rotate_half):
        return None
    # without a __name__ torch.compile looks names up here, not in transformers' module
    names = {name: x for name, x in forward.__globals__.items() if name != "__name__"} | {_ROTATE: _rotate}
    ours = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    now = forward.__globals__
    used = {name: now[name] for name in forward.__code__.co_names if name in now}

    def holds(self: Any) -> bool:
        places: list[_Place] = getattr(self, _PLACES)
        same = all(now.get(name) is x for name, x in used.items())
        return same and all(x is getattr(at, name, None) and _untouched(x, code) for at, name, x, code in places)

    return _while(forward, ours, holds)


def _loss(module: Any) -> Forward | None:
    known, forward = _known(), type(module).forward
    capped = _same(forward, known.gemma.Gemma2ForCausalLM.forward)
    if not capped and not _same(forward, known.llama.LlamaForCausalLM.forward):
        return None
    if not _plain(module.lm_head):
        return None
    return _while(forward, _loss_forward(forward, capped))


# what is looked at in each call --------------------------------------------------------------------------------------


def _while(original: Forward, ours: Forward, holds: Holds | None = None) -> Forward:
    """`ours` while a module's class has the forward that was recognised and `holds` says so, else the class's own."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(self)
        if kind.forward is original and (holds is None or holds(self)):
            return ours(self, *args, **kwargs)
        return kind.forward(self, *args, **kwargs)

    return forward


def _untouched(module: Any, forward: Forward) -> bool:
    """Whether calling the module is this forward and nothing else: no other one of its own or its class's, no hook."""
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
        _of_all._global_forward_hooks, _of_all._global_forward_pre_hooks, _of_all._global_backward_hooks,
        _of_all._global_backward_pre_hooks,
    )  # fmt: skip
    return getattr(module.forward, "__func__", None) is forward and not any(map(len, hooks))


def _plain(head: Any) -> bool:
    """Whether a call of the last layer is a product with its weight."""
    plain = type(head) is torch.nn.Linear and head.bias is None and _untouched(head, _LINEAR)
    return plain and type(head.weight) in (torch.nn.Parameter, torch.Tensor)


class _Place(NamedTuple):
    """Where a rotary embedding is, and what its class computed when it was looked at."""

    parent: torch.nn.Module
    name: str
    embedding: torch.nn.Module
    forward: Forward


def _places(model: torch.nn.Module) -> list[_Place]:
    """Of all rotary embeddings."""
    return [
        _Place(parent, name, x, type(x).forward)
        for parent in model.modules()
        for name, x in parent.named_children()
        if type(x).__name__.endswith("RotaryEmbedding")
    ]


# what is computed instead --------------------------------------------------------------------------------------------


def _norm_forward(self: Any, hidden_states: torch.Tensor) -> Any:
    dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
    return tw.rms_norm(hidden_states, _weight(self, hidden_states), eps=self.variance_epsilon, out_dtype=dtype)


def _offset_norm_forward(self: Any, x: torch.Tensor) -> Any:
    return tw.rms_norm(x, _weight(self, x), eps=self.eps, offset=1.0)


def _weight(norm: Any, x: torch.Tensor) -> Any:
    return norm.weight if norm.weight.dtype == x.dtype else norm.weight.float()


def _gated_forward(unit: Callable[..., torch.Tensor]) -> Forward:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(unit(self.gate_proj(x), self.up_proj(x)))

    return forward


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """`unsqueeze_dim` is where q and k have their heads; cos and sin are (1 or batch, seqlen, rotary_dim)."""
    dtype = torch.promote_types(q.dtype, cos.dtype)
    q, k = (x.to(dtype).movedim(unsqueeze_dim, 2) for x in (q, k))
    places = torch.arange(cos.shape[0] * cos.shape[1], device=cos.device, dtype=torch.int32)
    positions = places.view(cos.shape[:2]).expand(q.shape[:2]).reshape(-1)
    cos, sin = (x[..., : x.shape[-1] // 2].flatten(0, 1) for x in (cos, sin))
    q, k = tw.rope(q, k, rope=tw.Rope(cos, sin, positions))
    return q.movedim(2, unsqueeze_dim), k.movedim(2, unsqueeze_dim)


def _loss_forward(original: Forward, capped: bool) -> Forward:
    known = _known()

    def without_logits(self: Any, *args: Any, labels: torch.Tensor, **kwargs: Any) -> Any:
        outputs = self.model(*args, **kwargs)
        softcap = self.config.final_logit_softcapping if capped else None
        return known.output(
            loss=_loss_of(outputs.last_hidden_state, self.lm_head.weight, labels, softcap, **kwargs),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    fused = known.can_return_tuple(without_logits)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("labels") is None or "logits_to_keep" in kwargs
        ours = not asked and self.training and self.loss_function is known.loss and _plain(self.lm_head)
        return fused(self, *args, **kwargs) if ours else original(self, *args, **kwargs)

    return forward


def _loss_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    softcap: float | None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """transformers' ForCausalLMLoss, with its arguments."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    x, weight = autocast(x.flatten(0, -2), weight)
    loss = tw.linear_cross_entropy(
        x,
        weight,
        shift_labels.reshape(-1).to(x.device),
        ignore_index=ignore_index,
        softcap=softcap,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch
