"""What must hold of every implementation, checked on any device: each function raises AssertionError where it does not.

`impl` is a name of the dispatch table. Properties that compare with numbers use the budgets of
`tilewise.testing.budgets`; the rest compare bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from tilewise.core.errors import UnsupportedError
from tilewise.ops.attention.problem import make_call
from tilewise.ops.attention.table import ROWS, choose
from tilewise.testing.budgets import Expectation, encoded_expectation, error, expectation, fp8_products
from tilewise.testing.case import Case
from tilewise.testing.inputs import Inputs, make_inputs
from tilewise.testing.oracles import Dense, dense, gradients
from tilewise.testing.paging import by_channel, encoded, paged


@dataclass(frozen=True)
class Setting:
    """Who is tested, where, and at which dtype."""

    impl: str
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __repr__(self) -> str:
        return f"{self.impl}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def has_backward(self) -> bool:
        return next(row for row in ROWS if row.name == self.impl).backward is not None

    @property
    def unordered(self) -> tuple[str, ...]:
        """Results whose sums are taken in any order unless the call is deterministic."""
        return ("dq",) if self.impl == "hopper" else ()


def can_run(setting: Setting, case: Case, **arguments: Any) -> bool:
    """Whether the dispatch table lets `setting.impl` run the case, with `arguments` changed."""
    inputs = make_inputs(case, setting.dtype, setting.device, blank=True)
    with torch.set_grad_enabled(setting.has_backward):
        try:
            choose(make_call(inputs.q, inputs.k, inputs.v, **{**inputs.arguments(), **arguments}), setting.impl)
        except UnsupportedError:
            return False
    return True


# running and comparing ---------------------------------------------------------------------------------------------


def run(setting: Setting, inputs: Inputs, *, backward: bool | None = None, **arguments: Any) -> dict[str, torch.Tensor]:
    """Results by name: o, lse, and the gradients of every leaf unless `backward` is off or missing."""
    backward = setting.has_backward if backward is None else backward
    with torch.set_grad_enabled(backward):
        call = {**inputs.arguments(), **arguments}
        o, lse = tw.attention_with_lse(inputs.q, inputs.k, inputs.v, impl=setting.impl, **call)
    results = {"o": o, "lse": lse}
    if backward:
        leaves = inputs.leaves()
        outputs = [o] if inputs.dlse is None else [o, lse]
        upstream = [inputs.do] if inputs.dlse is None else [inputs.do, inputs.dlse]
        results |= dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), upstream), strict=True))
    return {name: value.detach() for name, value in results.items()}


def within(got: dict[str, torch.Tensor], want: Expectation) -> None:
    """Every result is as near to the truth as its budget says."""
    for name, value in got.items():
        truth = want.values[name]
        assert value.shape == truth.shape, f"{name}: shape {tuple(value.shape)}, expected {tuple(truth.shape)}"
        off = error(value, truth)
        assert off <= want.allowed[name], f"{name}: error {off:.3e}, allowed {want.allowed[name]:.3e}"


def same_bits(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], why: str, unordered: tuple[str, ...] = ()
) -> None:
    """Equal names and equal bits (a NaN equals itself). Those `unordered` may differ as float32 sums in another order
    do, once rounded.
    """
    assert one.keys() == other.keys()
    for name in one:
        a, b = one[name], other[name]
        assert torch.equal(a.isnan(), b.isnan()), f"{name} has other NaNs: {why}"
        a, b = a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)
        if name in unordered:
            step = torch.finfo(a.dtype).eps
            torch.testing.assert_close(a, b, rtol=step, atol=step * 1e-2 * float(a.abs().max()), msg=f"{name}: {why}")
        else:
            assert torch.equal(a, b), f"{name} differs: {why}"


def _edited(case: Case, setting: Setting, **tensors: torch.Tensor) -> Inputs:
    inputs = make_inputs(case, setting.dtype, setting.device)
    for name, value in tensors.items():
        setattr(inputs, name, value.detach().to(setting.dtype).requires_grad_())
    return inputs


def _in_float64(inputs: Inputs) -> Dense:
    """Dense attention in float64. PyTorch's own bf16 products on CPUs with AMX put a row's NaN into the row before."""
    return dense(inputs, inputs.q.double(), inputs.k.double(), inputs.v.double())


# against the truth -------------------------------------------------------------------------------------------------


def equals_reference(setting: Setting, case: Case) -> None:
    """o and lse within budget of dense float64 attention, in the documented dtypes; empty rows exactly 0 and -inf."""
    inputs = make_inputs(case, setting.dtype, setting.device)
    got = run(setting, inputs, backward=False)
    wide = torch.float64 if setting.dtype == torch.float64 else torch.float32
    assert (got["o"].dtype, got["lse"].dtype) == (setting.dtype, wide)
    want = expectation(case, setting.dtype, setting.device)
    within(got, want)
    empty = want.values["lse"] == -torch.inf
    rows = got["o"].transpose(0, 1) if case.packed is not None else got["o"].transpose(1, 2)
    assert bool((got["lse"][empty] == -torch.inf).all())
    assert bool((rows[empty] == 0).all())


def gradients_equal_reference(setting: Setting, case: Case, deterministic: bool = False) -> None:
    """Gradients of q, k, v, sink and captured tensors, through o, and lse where the case asks, within budget."""
    inputs = make_inputs(case, setting.dtype, setting.device)
    got = run(setting, inputs, deterministic=deterministic)
    for name, leaf in inputs.leaves().items():
        assert got[name].dtype == leaf.dtype, f"{name}: {got[name].dtype}, expected {leaf.dtype}"
    within(got, expectation(case, setting.dtype, setting.device))


def memory_does_not_matter(setting: Setting, case: Case, unit: int = 1) -> None:
    """q, k, v and the upstream gradient as views: heads outermost, rows of odd strides that start anywhere (both in
    units of `unit` elements). Each is within budget, as contiguous tensors are."""

    def heads_first(x: torch.Tensor, n: int) -> torch.Tensor:
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)

    def odd_rows(x: torch.Tensor, n: int) -> torch.Tensor:
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 5 * unit), torch.nan)
        inside = wide[..., n * unit : n * unit + x.shape[-1]]
        return inside.copy_(x)

    want = expectation(case, setting.dtype, setting.device)
    names = ("q", "k", "v", "do")
    for view, viewed in ((heads_first, names), (odd_rows, names), (odd_rows, ("do",)), (odd_rows, ("v",))):
        inputs = make_inputs(case, setting.dtype, setting.device)
        for n, name in enumerate(viewed):
            x = getattr(inputs, name)
            setattr(inputs, name, view(x.detach(), n).requires_grad_(x.requires_grad))
        within(run(setting, inputs), want)


# bits --------------------------------------------------------------------------------------------------------------


def repeats_are_equal(setting: Setting, case: Case, times: int = 3, deterministic: bool = True) -> None:
    """With deterministic=True every run gives the same bits, backward included; without, all but what is unordered."""
    inputs = make_inputs(case, setting.dtype, setting.device)
    first = run(setting, inputs, deterministic=deterministic)
    for _ in range(times - 1):
        other = run(setting, inputs, deterministic=deterministic)
        same_bits(first, other, "two runs of one call", () if deterministic else setting.unordered)


def hidden_keys_do_not_matter(setting: Setting, case: Case) -> None:
    """Other finite values in keys that no query of their batch element sees change no bit; these get no gradient."""
    assert case.packed is None
    assert case.mask is not None
    probe = make_inputs(case, setting.dtype, setting.device)
    assert probe.mask is not None
    b = torch.arange(case.batch, device=setting.device)[:, None, None, None]
    h = torch.arange(case.heads_q, device=setting.device)[:, None, None]
    i = torch.arange(case.seqlen_k - case.seqlen_q, case.seqlen_k, device=setting.device)[:, None]
    j = torch.arange(case.seqlen_k, device=setting.device)
    seen = probe.mask.plain(b, h, i, j).expand(case.batch, case.heads_q, case.seqlen_q, case.seqlen_k)
    hidden = ~seen.any(1).any(1)[:, :, None, None]  # (batch, seqlen_k, 1, 1)
    assert bool(hidden.any()), "the case hides no key from all queries"
    other = _edited(case, setting, k=torch.where(hidden, 50.0, probe.k), v=torch.where(hidden, -90.0, probe.v))
    before, after = run(setting, probe), run(setting, other)
    same_bits(before, after, "only hidden keys changed", setting.unordered)
    for name in ("dk", "dv"):
        if name in after:
            assert not bool((after[name] * hidden).any()), f"{name} of a hidden key is not 0"


def batch_elements_are_independent(setting: Setting, case: Case) -> None:
    """NaN in one batch element's q, k and v reaches no other element, and changes no bit of it."""
    assert case.packed is None
    assert case.batch > 1
    clean = make_inputs(case, setting.dtype, setting.device)
    spoilt = {name: getattr(clean, name).detach().clone() for name in ("q", "k", "v")}
    for value in spoilt.values():
        value[0] = torch.nan
    before, after = run(setting, clean), run(setting, _edited(case, setting, **spoilt))
    shared = ("dsink", "dcaptured")  # sums over the batch
    one, other = ({n: x[1:] for n, x in r.items() if not n.startswith(shared)} for r in (before, after))
    same_bits(one, other, "another batch element is NaN", setting.unordered)


def nan_and_inf_propagate(setting: Setting, case: Case) -> None:
    """NaN and inf in a visible key or value give NaN exactly where PyTorch's dense attention does."""
    for name, value in (("q", torch.nan), ("k", torch.nan), ("v", torch.nan), ("v", torch.inf), ("k", torch.inf)):
        clean = make_inputs(case, setting.dtype, setting.device)
        spoilt = getattr(clean, name).detach().clone()
        spoilt[-1, 0, -1] = value  # the first position: visible to every query of a causal mask
        edited = _edited(case, setting, **{name: spoilt})
        got, want = run(setting, edited, backward=False), _in_float64(edited)
        for result, truth in (("o", want.o), ("lse", want.lse)):
            assert torch.equal(got[result].isnan(), truth.isnan()), f"{value} in {name}: other NaNs in {result}"


def nan_reaches_gradients(setting: Setting, case: Case) -> None:
    """Where every pair is visible, NaN in q, k or v gives NaN in exactly the gradients where autograd gives it."""
    assert case.mask is None
    assert case.packed is None
    for name in ("q", "k", "v"):
        spoilt = getattr(make_inputs(case, setting.dtype, setting.device), name).detach().clone()
        spoilt[-1, -1, 0] = torch.nan
        edited = _edited(case, setting, **{name: spoilt})
        got, one = run(setting, edited), _in_float64(edited)
        for leaf, truth in gradients(edited, one.o, one.lse).items():
            assert torch.equal(got[leaf].isnan(), truth.isnan()), f"NaN in {name}: other NaNs in {leaf}"


# equivalences ------------------------------------------------------------------------------------------------------


def keys_may_be_permuted(setting: Setting, case: Case) -> None:
    """Without a mask or positions, another order of the keys gives the same o, lse and dq, and dk, dv in that order."""
    assert case.mask is None
    assert case.packed is None
    plain = make_inputs(case, setting.dtype, setting.device)
    order = torch.randperm(case.seqlen_k, generator=torch.Generator().manual_seed(3)).to(setting.device)
    got = run(setting, _edited(case, setting, k=plain.k[:, order], v=plain.v[:, order]))
    back = torch.argsort(order)
    within(
        {n: x[:, back] if n in ("dk", "dv") else x for n, x in got.items()},
        expectation(case, setting.dtype, setting.device),
    )


def groups_equal_expanded_heads(setting: Setting, case: Case) -> None:
    """Grouped heads equal key/value heads repeated for each query head; dk and dv are the sums over a group."""
    assert case.group > 1
    plain = make_inputs(case, setting.dtype, setting.device)
    k, v = (x.repeat_interleave(case.group, -2) for x in (plain.k, plain.v))
    got = run(setting, _edited(case, setting, k=k, v=v))
    for name in ("dk", "dv"):
        if name in got:
            wide = got[name].double()
            got[name] = wide.reshape(*wide.shape[:-2], case.heads_kv, case.group, wide.shape[-1]).sum(-2)
    within(got, expectation(case, setting.dtype, setting.device))


def packed_equals_padded(setting: Setting, case: Case) -> None:
    """A packed case of equal query and key lengths, run padded to one length with key padding hidden, is the same."""
    assert case.packed is not None
    lengths = [q for q, k in case.packed if q == k]
    assert len(lengths) == len(case.packed)
    packed = make_inputs(case, setting.dtype, setting.device)
    longest = max(lengths)

    def pad(x: torch.Tensor) -> torch.Tensor:
        rows = [torch.nn.functional.pad(r, (0, 0, 0, 0, 0, longest - len(r))) for r in torch.split(x.detach(), lengths)]
        return torch.stack(rows).requires_grad_()

    def cut(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)])

    inner = packed.mask.formula if packed.mask is not None else tw.window(None, None)
    seqlens = torch.tensor(lengths, device=setting.device)
    dense = make_inputs(case, setting.dtype, setting.device)
    dense.q, dense.k, dense.v, dense.do = pad(packed.q), pad(packed.k), pad(packed.v), pad(packed.do).detach()
    assert dense.dlse is None
    got = run(setting, dense, layout=None, mask=inner & tw.lengths(seqlens))
    for name in ("o", "dq", "dk", "dv"):
        if name in got:
            got[name] = cut(got[name])
    got["lse"] = cut(got["lse"].transpose(1, 2)).transpose(0, 1)
    within(got, expectation(case, setting.dtype, setting.device))


def pages_hold_the_keys(
    setting: Setting, case: Case, page_size: int = 16, flat: bool = False, **arguments: Any
) -> None:
    """Keys in pages of a pool, in any order, with NaN in all slots of nobody, give what the keys in rows do."""
    inputs = make_inputs(case, setting.dtype, setting.device)
    pool = paged(inputs, page_size, flat=flat)
    with torch.no_grad():
        arguments = inputs.arguments() | {"layout": pool.layout} | arguments
        o, lse = tw.attention_with_lse(inputs.q, pool.k, pool.v, impl=setting.impl, **arguments)
    within({"o": o, "lse": lse}, expectation(case, setting.dtype, setting.device))


def encoded_pages_hold_the_keys(
    setting: Setting, case: Case, kind: str, page_size: int = 16, flat: bool = False, *, fp8: bool = False,
    bits: int = 0, **arguments: Any,
) -> None:  # fmt: skip
    """Encoded pages, with any codes and scales in slots of nobody, give what the keys that they stand for do; with
    `fp8`, by an implementation whose scores are products of fp8; with `bits`, keys by channel.
    """
    inputs = make_inputs(case, setting.dtype, setting.device)
    pool = paged(inputs, page_size, flat=flat)
    with torch.no_grad():
        arguments = inputs.arguments() | {"layout": pool.layout} | arguments
        k, v = by_channel(pool.k, bits) if bits else encoded(pool.k, kind), encoded(pool.v, kind)
        o, lse = tw.attention_with_lse(inputs.q, k, v, impl=setting.impl, **arguments)
    channels = (page_size, bits) if bits else None
    want = encoded_expectation(case, setting.dtype, kind, setting.device, channels)
    within({"o": o, "lse": lse}, fp8_products(want, case, setting.dtype, setting.device) if fp8 else want)


def last_queries_stand_at_the_last_keys(setting: Setting, case: Case, count: int = 5) -> None:
    """The last rows of a call are the call with those queries alone: i is aligned to the bottom right."""
    assert case.packed is None
    whole = make_inputs(case, setting.dtype, setting.device)
    tail = _edited(case, setting, q=whole.q[:, -count:], do=whole.do[:, -count:])
    got = run(setting, tail, backward=False)
    want = expectation(case, setting.dtype, setting.device)
    values = {"o": want.values["o"][:, -count:], "lse": want.values["lse"][..., -count:]}
    within(got, Expectation(values, want.allowed))


def parts_merge_by_lse(setting: Setting, case: Case) -> None:
    """Keys cut in two, each part attended to on its own, merge by their lse into the whole."""
    assert case.mask is None
    assert case.score is None
    assert case.sink is False
    whole, half = make_inputs(case, setting.dtype, setting.device), case.seqlen_k // 2
    found = []
    for keys in (slice(0, half), slice(half, None)):
        found.append(run(setting, _edited(case, setting, k=whole.k[:, keys], v=whole.v[:, keys]), backward=False))
    lse = torch.logaddexp(found[0]["lse"].double(), found[1]["lse"].double())
    weights = [torch.exp(one["lse"].double() - lse).transpose(1, 2)[..., None] for one in found]
    merged = {"o": weights[0] * found[0]["o"].double() + weights[1] * found[1]["o"].double(), "lse": lse}
    want = expectation(case, setting.dtype, setting.device)
    within(
        merged, Expectation(want.values, {n: 2 * x for n, x in want.allowed.items()})
    )  # two roundings of o instead of one


def formulas_of_one_meaning_agree(setting: Setting, case: Case, mask: Any = None, score: Any = None) -> None:
    """The case with its mask or score spelled in another way is still within budget of the case itself."""
    inputs = make_inputs(case, setting.dtype, setting.device)
    other = {name: value for name, value in (("mask", mask), ("score", score)) if value is not None}
    within(run(setting, inputs, **other), expectation(case, setting.dtype, setting.device))


def a_constant_moves_only_lse(setting: Setting, case: Case, constant: float = 2.5) -> None:
    """Adding a constant to every score leaves o and the gradients, and adds the constant to lse."""
    assert case.score is None
    assert case.sink is False
    inputs = make_inputs(case, setting.dtype, setting.device)
    got = run(setting, inputs, score=lambda s, b, h, i, j: s + constant)
    got["lse"] = got["lse"] - constant
    want = expectation(case, setting.dtype, setting.device)
    within(
        got, Expectation(want.values, {n: 2 * x for n, x in want.allowed.items()})
    )  # scores are larger by the constant


def dropout_follows_its_seed(setting: Setting, case: Case) -> None:
    """One seed gives one result, another seed another; the share of dropped weights is the probability asked for."""
    assert case.packed is None
    inputs = make_inputs(case.with_(dropout=0.0), setting.dtype, setting.device)
    ones = torch.eye(case.seqlen_k, case.head_dim_v, dtype=setting.dtype, device=setting.device)
    inputs.v = ones[:, None].expand(case.batch, -1, case.heads_kv, -1).detach()  # o shows the weights of the first keys
    probability = 0.25
    first = run(setting, inputs, backward=False, dropout=probability, seed=5)
    same_bits(first, run(setting, inputs, backward=False, dropout=probability, seed=5), "one seed")
    other = run(setting, inputs, backward=False, dropout=probability, seed=6)
    assert not torch.equal(first["o"], other["o"]), "two seeds drop the same weights"
    assert torch.equal(first["lse"], other["lse"]), "lse must not depend on dropout"
    whole = run(setting, inputs, backward=False)["o"]
    shown = (whole > 0)[..., : min(case.seqlen_k, case.head_dim_v)]
    share = float((first["o"][..., : shown.shape[-1]] == 0)[shown].double().mean())
    spread = (probability * (1 - probability) / int(shown.sum())) ** 0.5
    assert abs(share - probability) < 5 * spread, f"dropped {share:.4f}, asked for {probability}"


def explain(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tw.Explanation:
    """What `tilewise.why` says of a case."""
    inputs = make_inputs(case, dtype, device)
    return tw.why(inputs.q, inputs.k, inputs.v, **inputs.arguments())
