"""`sample` on a CPU: against its specification, transformers, and what a distribution must be."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import tilewise as tw
from tilewise.ops.sampling import cpu, cpu_noise, reference
from tilewise.testing import sampling as cases
from tilewise.testing.sampling import SamplingCase

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("case", cases.CASES, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_specification(case: SamplingCase, dtype: torch.dtype) -> None:
    cases.check(cases.make_arguments(case, dtype), "cpu")


@pytest.mark.parametrize("truncation", cases.TRUNCATIONS)
def test_wide_rows_some_at_a_time(truncation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that top-p does not decide by few logits, noise in parts, rows in chunks."""
    monkeypatch.setattr(cpu, "_ELEMENTS", 9000)
    monkeypatch.setattr(cpu, "_COUNTERS", 500)
    case = SamplingCase("mixed", truncation, lists="processed 5", rows=10, width=4001)
    arguments = cases.make_arguments(case, torch.float32)
    for scale in (0.1, 1.0, 4.0):
        cases.check(arguments | {"logits": scale * arguments["logits"]}, "cpu")


@pytest.mark.parametrize("first_token", [0, 1, 7])
def test_random_bits_are_those_of_philox(first_token: int) -> None:
    case = SamplingCase("none", first_token=first_token, width=50)
    call = cases.call_of(cases.make_arguments(case, torch.float32))
    group = torch.arange(first_token // 4, (first_token + 50) // 4 + 1)
    found = cpu_noise.words(call.seeds[:, None], call.positions[:, None].long(), group[None]).flatten(1)
    wanted = torch.stack([reference.words(call, row) for row in range(5)])
    assert torch.equal(found[:, first_token % 4 :][:, :50], wanted)
    noise = cpu_noise.gumbel(wanted).double()
    torch.testing.assert_close(
        noise, -torch.log(-torch.log1p(-reference.distance(wanted).double())), rtol=3e-7, atol=3e-7
    )


def test_noise_is_finite_and_has_the_bounds_that_are_named() -> None:
    ends = torch.tensor([0, 1, 2**31, 2**32 - 2**8, 2**32 - 1])
    share = reference.distance(ends)
    assert bool(((share > 0) & (share < 1)).all())
    noise = cpu_noise.gumbel(ends)
    assert bool(((noise <= cpu.LARGEST_NOISE) & (noise >= cpu.LEAST_NOISE)).all())
    assert float(noise[0]) > cpu.LARGEST_NOISE - 0.01
    assert float(noise[-1]) < cpu.LEAST_NOISE + 0.02


def chi_square(tokens: torch.Tensor, probability: torch.Tensor) -> float:
    """The statistic, less its mean, in standard deviations."""
    seen = probability > 0
    count, expected = torch.bincount(tokens, minlength=len(seen)).double(), len(tokens) * probability.double()
    assert not count[~seen].any()
    freedom = int(seen.sum()) - 1
    statistic = float(((count - expected)[seen] ** 2 / expected[seen]).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("truncation", [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}])
@pytest.mark.parametrize("varied", ["seeds", "positions"])
def test_tokens_come_with_their_probability(truncation, varied: str) -> None:
    draws = 200_000
    logits = torch.randn(13, generator=torch.Generator().manual_seed(1))
    other = {"seeds": 5, "positions": 17}
    found = tw.sample(
        logits.expand(draws, 13), temperature=0.7, **(other | {varied: torch.arange(draws)}), **truncation, logprobs=13,
        logprobs_of="processed",
    )  # fmt: skip
    probability = torch.zeros(13)
    listed = found.top_tokens[0] >= 0
    probability[found.top_tokens[0][listed]] = found.top_logprobs[0][listed].exp()
    assert abs(chi_square(found.tokens, probability)) < 4.0
    assert abs(chi_square(found.tokens, (0.9 * probability + 0.1 / 13).where(probability > 0, probability))) > 10.0


def test_far_tokens_come_too() -> None:
    """Probabilities of some 1e-6 need more bits than 23 of u."""
    tokens = tw.sample(torch.zeros(60, 30_000), seeds=torch.arange(60), positions=0).tokens
    assert len(tokens.unique()) > 57
    logits = torch.full((40_000, 64), -9.0)
    logits[:, 5] = 0.0
    tokens = tw.sample(logits, seeds=1, positions=torch.arange(40_000)).tokens
    share = float((tokens != 5).float().mean())
    wanted = 63 * math.exp(-9.0) / (1 + 63 * math.exp(-9.0))
    assert abs(share - wanted) < 4 * math.sqrt(wanted / len(tokens))


def rows_of(arguments: dict, chosen: torch.Tensor) -> dict:
    """The same call with other rows."""
    found = dict(arguments)
    for name in ("logits", "temperature", "top_k", "top_p", "min_p", "seeds", "positions"):
        if isinstance(found.get(name), torch.Tensor):
            found[name] = found[name][chosen]
    penalties = found.get("penalties")
    if penalties is not None:
        by_row = {name: getattr(penalties, name) for name in ("request", "repetition", "presence", "frequency")}
        by_row = {name: x[chosen] if isinstance(x, torch.Tensor) else x for name, x in by_row.items()}
        found["penalties"] = dataclasses.replace(penalties, **by_row)
    if "bias" in found:
        found["bias"] = tuple(x[chosen] for x in found["bias"])
    if "allowed" in found:
        found["allowed"] = (found["allowed"][0], found["allowed"][1][chosen])
    return found


@pytest.mark.parametrize("truncation", cases.TRUNCATIONS)
def test_a_row_depends_on_itself_alone(truncation: str) -> None:
    case = SamplingCase("mixed", truncation, cases.PENALTIES[3], True, "masks", rows=12)
    arguments = cases.make_arguments(case, torch.float32)
    whole = tw.sample(**arguments)
    for chosen in (torch.tensor([3]), torch.arange(11, -1, -1), torch.tensor([7, 7, 2])):
        part = tw.sample(**rows_of(arguments, chosen))
        assert torch.equal(part.tokens, whole.tokens[chosen])
        torch.testing.assert_close(part.values, whole.values[chosen], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", cases.TEMPERATURES)
@pytest.mark.parametrize("parts", [[100, 103], [1, 2, 30, 170]])
def test_shards_choose_what_the_whole_vocabulary_does(temperature: str, parts: list[int]) -> None:
    arguments = cases.make_arguments(
        SamplingCase(temperature, "none", cases.PENALTIES[3], True, rows=40), torch.float32
    )
    arguments["logits"][7, 150] = torch.nan
    arguments["logits"][8] = -torch.inf
    whole = tw.sample(**arguments)
    assert whole.tokens[7:9].tolist() == [-1, -1]
    shards, first = [], 0
    for part in parts:
        columns = arguments["logits"][:, first : first + part]
        shards.append(tw.sample(**(arguments | {"logits": columns, "first_token": first})))
        first += part
    values, tokens = torch.stack([s.values for s in shards]), torch.stack([s.tokens for s in shards])
    assert torch.equal(tw.combine_shards(values, tokens), whole.tokens)


@pytest.mark.parametrize("truncation", cases.TRUNCATIONS[1:])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_keeps_what_transformers_keeps(truncation: str, temperature: float) -> None:
    x = 3.0 * torch.randn(20, 64, generator=torch.Generator().manual_seed(2))  # without equal ones
    kept, warpers = {}, [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    for name in truncation.split():
        kept[name] = {"top_k": 9, "top_p": 0.8, "min_p": 0.07}[name]
        warpers.append(
            {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}[name](kept[name])
        )
    wanted = LogitsProcessorList(warpers)(torch.zeros(20, 1, dtype=torch.long), x)
    found = tw.sample(x, temperature=temperature, seeds=0, positions=0, logprobs=64, logprobs_of="processed", **kept)
    for row in range(20):
        tokens = found.top_tokens[row][found.top_tokens[row] >= 0]
        assert sorted(tokens.tolist()) == (wanted[row] > -torch.inf).nonzero()[:, 0].tolist()
        logs = wanted[row].log_softmax(-1)[tokens]
        torch.testing.assert_close(found.top_logprobs[row, : len(tokens)], logs, rtol=1e-5, atol=1e-5)


def processed(x: torch.Tensor, penalties: tw.Penalties) -> torch.Tensor:
    """Log probabilities after penalties, in the order of tokens."""
    found = tw.sample(
        x, temperature=1, seeds=0, positions=0, penalties=penalties, logprobs=x.shape[1], logprobs_of="processed"
    )
    return torch.zeros_like(x).scatter(1, found.top_tokens, found.top_logprobs)


def test_penalties_are_those_of_transformers_and_of_the_api() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 20, generator=generator)
    history = torch.randint(0, 20, (4, 15), generator=generator, dtype=torch.int32)
    prompt, lengths = torch.full((4,), 6, dtype=torch.int32), torch.full((4,), 15, dtype=torch.int32)
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(history.long(), x.clone())
    found = processed(x, tw.Penalties(history, prompt, lengths, repetition=1.7))
    torch.testing.assert_close(found, wanted.log_softmax(-1), rtol=1e-5, atol=1e-5)
    # mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence
    count = torch.stack([torch.bincount(row[6:], minlength=20) for row in history])
    wanted = x - count * 0.4 - (count > 0).float() * 0.9
    found = processed(x, tw.Penalties(history, prompt, lengths, presence=0.9, frequency=0.4))
    torch.testing.assert_close(found, wanted.log_softmax(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_equal_logits_come_by_index(impl: str) -> None:
    x = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0]])
    assert tw.sample(x, temperature=0, impl=impl).tokens.tolist() == [1]
    kinds = {"top_k": 3, "top_p": 0.5}
    for name, value in kinds.items():
        arguments = {"seeds": 1, "positions": 1, "logprobs": 6, "logprobs_of": "processed", "impl": impl, name: value}
        assert tw.sample(x, **arguments).top_tokens.tolist() == [[1, 2, 3, -1, -1, -1]], name
    zeros = torch.tensor([[-0.0, 0.0, -1.0]])
    assert tw.sample(zeros, temperature=0, impl=impl).tokens.tolist() == [0]


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("temperature", [0, 1.3])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_rows_that_fail_are_told_apart(impl: str, temperature: float, truncation) -> None:
    x = torch.zeros(5, 6)
    x[1, 3], x[2, 0], x[3] = torch.nan, torch.inf, -torch.inf
    found = tw.sample(x, temperature=temperature, seeds=0, positions=0, logprobs=2, impl=impl, **truncation)
    assert (found.tokens >= 0).tolist() == [True, False, False, False, True]
    assert found.values.isnan().tolist() == [False, True, True, False, False]
    assert float(found.values[3]) == -torch.inf
    assert found.logprobs.isnan().tolist() == [False, True, True, True, False]
    assert (found.top_tokens < 0).all(1).tolist() == [False, True, True, True, False]


def test_no_rows_and_one_token() -> None:
    assert tw.sample(torch.zeros(0, 5), temperature=0).tokens.shape == (0,)
    found = tw.sample(torch.zeros(3, 1), seeds=0, positions=0, top_p=0.5, logprobs=1)
    assert found.tokens.tolist() == [0, 0, 0]
    assert not found.logprobs.any()


def test_numbers_are_the_same_as_tensors() -> None:
    x = torch.randn(4, 30)
    numbers = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "seeds": -5, "positions": 2**20}
    dtypes = {"top_k": torch.int32, "seeds": torch.int64, "positions": torch.int32}
    tensors = {name: torch.full((4,), value, dtype=dtypes.get(name)) for name, value in numbers.items()}
    for found, wanted in zip(tw.sample(x, **numbers), tw.sample(x, **tensors), strict=True):
        assert (found is None and wanted is None) or torch.equal(found, wanted)


@pytest.mark.parametrize("function", [tw.sample, tw.combine_shards, tw.Penalties])
def test_examples_run(function) -> None:
    found = doctest.DocTestParser().get_doctest(inspect.getdoc(function), {"tw": tw, "torch": torch}, "it", None, 0)
    assert found.examples
    said: list[str] = []
    assert doctest.DocTestRunner().run(found, out=said.append).failed == 0, "".join(said)


def test_compiles_whole() -> None:
    torch._dynamo.reset()

    def model(x: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        return tw.sample(2.0 * x, temperature=temperature, top_p=0.9, seeds=1, positions=2, logprobs=2).tokens + 1

    x, temperature = torch.randn(3, 40), torch.tensor([0.0, 0.5, 1.0])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, temperature), model(x, temperature))


@pytest.mark.parametrize("offset", [1e4, 1e9, -1e30])
def test_what_all_logits_have_added_changes_nothing(offset: float) -> None:
    cases.check_far_logits(offset, "cpu")
