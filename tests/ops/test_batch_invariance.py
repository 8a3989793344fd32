"""`batch_invariant=True` on the CPU, and who refuses it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import UnsupportedError
from tilewise.testing import properties, serving
from tilewise.testing.case import Case
from tilewise.testing.cases import causal as causal_of
from tilewise.testing.properties import Setting

LENGTHS = st.tuples(st.integers(0, 40), st.integers(0, 300))


@settings(max_examples=25, deadline=None)
@given(
    mine=st.tuples(st.integers(1, 40), st.integers(1, 300)), others=st.lists(LENGTHS, min_size=1, max_size=3),
    page_size=st.none() | st.integers(1, 40), head_dim=st.sampled_from([3, 16, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), impl=st.sampled_from(["cpu_tiled", "reference"]),
)  # fmt: skip
def test_other_requests_change_nothing(
    mine: tuple[int, int], others: list[tuple[int, int]], page_size: int | None, head_dim: int, dtype: torch.dtype,
    impl: str,
) -> None:  # fmt: skip
    """Packed, and in pages of any size."""
    setting = Setting(impl, dtype)
    case = Case("mine", packed=(mine,), heads_q=4, heads_kv=2, head_dim=head_dim, head_dim_v=8, mask=causal_of)
    alone = serving.among_others(setting, case, [], 0, page_size and 16, batch_invariant=True)
    for place in {0, len(others) // 2, len(others)}:
        got = serving.among_others(setting, case, others, place, page_size, batch_invariant=True)
        properties.same_bits(got, alone, f"place {place} among {others}")


def _dense(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch of four."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(4, rows, 2, 16, generator=generator) for rows in (7, 333, 333))
    return q, k, v


def _elements_differ(invariant: bool) -> int:
    """How many elements of some dense batches have other bits than alone."""
    count = 0
    for seed in range(8):
        q, k, v = _dense(seed)
        mask = tw.causal & tw.window(200)
        batch = tw.attention(q, k, v, mask=mask, impl="cpu_tiled", batch_invariant=invariant)
        for b in range(4):
            one = [x[b : b + 1].clone() for x in (q, k, v)]
            count += not torch.equal(
                batch[b : b + 1], tw.attention(*one, mask=mask, impl="cpu_tiled", batch_invariant=invariant)
            )
    return count


def test_elements_of_a_dense_batch() -> None:
    assert _elements_differ(invariant=False), "if nothing differs by default, this proves nothing"
    assert not _elements_differ(invariant=True)


def test_formulas_see_the_batch_element() -> None:
    q, k, v = _dense(0)
    mask = tw.lengths(torch.tensor([300, 5, 0, 77]))
    got = tw.attention_with_lse(q, k, v, mask=mask, batch_invariant=True)
    torch.testing.assert_close(got, tw.attention_with_lse(q, k, v, mask=mask))


def test_gradients_of_a_dense_batch() -> None:
    q, k, v = (x.requires_grad_() for x in _dense(0))
    found = [
        torch.autograd.grad(tw.attention(q, k, v, impl="cpu_tiled", batch_invariant=flag).sum(), (q, k, v))
        for flag in (True, False)
    ]
    torch.testing.assert_close(*found)


def test_compiled() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, k, v, mask=tw.causal, batch_invariant=True)

    tensors = _dense(0)
    assert torch.equal(torch.compile(attend, fullgraph=True, backend="aot_eager")(*tensors), attend(*tensors))


def test_who_does_not_promise_it_says_so() -> None:
    verdicts = {name: verdict for name, _, verdict in tw.why(*_dense(0), batch_invariant=True).rows}
    assert verdicts["cpu_sdpa"] == "needs batch_invariant=False; got batch_invariant=True"
    assert verdicts["cpu_tiled"].startswith("chosen")
    with pytest.raises(UnsupportedError, match="batch_invariant=False \\(got batch_invariant=True\\)"):
        tw.attention(*_dense(0), impl="cpu_sdpa", batch_invariant=True)
