"""The demo as a whole, at tiny sizes: it learns, the curves agree, and a wrong attention is found out."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tilewise
import tilewise.demo
from tilewise.core.errors import TilewiseError
from tilewise.demo import Options, run
from tilewise.demo.memory import kept
from tilewise.demo.operators import torch_attention
from tilewise.demo.optim import orthogonalize, schedule
from tilewise.demo.result import Curves

TINY = Options(size="tiny", steps=25, seqlen=48, device="cpu", new_tokens=12)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few real files, so that reading and tokenizing take no time."""
    folder = tmp_path_factory.mktemp("text")
    for name in ("ast", "bisect", "heapq", "textwrap"):
        source = Path(ast.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def result(text: Path) -> tilewise.demo.Result:
    return run(replace(TINY, text=(text,)))


def test_loss_falls_and_the_curves_agree(result: tilewise.demo.Result) -> None:
    assert result.passed
    assert result.curves.first() == pytest.approx(math.log(result.vocab_size), abs=0.3)
    assert result.curves.last() < result.curves.first() - 0.4
    assert result.curves.max_difference is not None
    assert result.curves.max_difference < 1e-4
    assert 0 < result.new_tokens <= 12
    assert result.held_out_loss < result.curves.first()


def test_where_pytorchs_kernel_runs_the_librarys_own_joins(result: tilewise.demo.Result) -> None:
    assert result.implementation == "cpu_sdpa"
    assert set(result.curves.losses) == {"tilewise", "torch", "tilewise cpu_tiled"}
    assert 0 < result.curves.differences()["tilewise cpu_tiled"][0] < 1e-4


def test_the_result_is_json_and_text(result: tilewise.demo.Result) -> None:
    data = json.loads(json.dumps(result.as_dict()))
    assert data["passed"] is True
    assert len(data["losses"]["torch"]) == 25
    assert data["compared_with_torch"]["tilewise"]["steps"] == 25
    summary = result.summary()
    assert "the curves agree" in summary
    assert " ms" not in summary, "models side by side share the cores: their times are not compared"
    assert "median step" in replace(result, in_turns=True).summary()


def test_memory_is_measured_of_the_same_work(result: tilewise.demo.Result) -> None:
    causal, window = result.memory
    rows = 2048 * 2  # tokens and heads
    least = 4 * rows * (16 + 1)  # float32 outputs of 16 dimensions, and a log-sum-exp
    assert causal.bytes["tilewise"] == window.bytes["tilewise"] == least
    assert window.bytes["sdpa"] >= least + 2048**2, "a mask of 2,048 x 2,048"
    assert min(kept.bytes["scores"] for kept in result.memory) >= 4 * rows * 2048
    assert max(kept.difference for kept in result.memory) < 1e-5
    assert f"{window.bytes['sdpa'] / 1e6:.1f} MB" in result.summary()


def test_memory_counts_what_autograd_keeps() -> None:
    def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q * k) * v  # keeps q, k, v and their product

    q, k, v = (torch.randn(3, 5, requires_grad=True) for _ in range(3))
    assert kept(twice, q, k, v)[0] == 3 * 5 * 4


def test_side_by_side_or_one_after_the_other_is_the_same(text: Path) -> None:
    before = torch.get_num_threads()
    curves = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            curves.append(run(replace(TINY, text=(text,), steps=6, new_tokens=0)).curves)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert curves[0] == curves[1]


def test_the_same_seed_gives_the_same_run_and_another_another(text: Path, result: tilewise.demo.Result) -> None:
    options = replace(TINY, text=(text,), compare=False)
    again, other = run(options), run(replace(options, seed=1))
    assert again.curves.losses["tilewise"] == result.curves.losses["tilewise"]
    assert again.generated == result.generated
    assert other.curves.losses["tilewise"] != result.curves.losses["tilewise"]
    assert again.curves.max_difference is None
    assert again.passed


def test_an_implementation_named_for_training_need_not_decode(text: Path) -> None:
    found = run(replace(TINY, text=(text,), steps=2, impl="cpu_sdpa"))
    assert found.passed
    assert set(found.curves.losses) == {"tilewise", "torch"}
    assert found.new_tokens > 0


def wrong_scale(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch_attention(2 * q, k, v)


def sees_the_future(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, enable_gqa=True).transpose(1, 2)


def wrong_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch_attention(q, k, 0.5 * v + 0.5 * v.detach())


def not_a_number(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch_attention(q, k, v) * math.nan


@pytest.mark.parametrize("attend", [wrong_scale, sees_the_future, wrong_gradient, not_a_number])
def test_a_wrong_attention_is_found_out(text: Path, attend: tilewise.demo.Attend) -> None:
    found = run(replace(TINY, text=(text,), new_tokens=0), attend=attend)
    assert not found.passed
    assert "DISAGREE" in found.summary()


def test_a_loss_that_is_not_a_number_fails_without_a_comparison_too(text: Path) -> None:
    options = replace(TINY, text=(text,), steps=2, new_tokens=0, compare=False)
    assert not run(options, attend=not_a_number).passed


def test_the_standard_library_in_bf16() -> None:
    found = run(replace(TINY, steps=3, dtype="bf16", compare=True))
    assert found.passed
    assert "standard library" in found.text
    assert found.tolerance == tilewise.demo.TOLERANCE["bf16"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(size="huge"), "size: got 'huge'"),
        (Options(device="tpu"), "device: got 'tpu'"),
        (Options(device="meta"), "device: got meta"),
        (Options(device="cuda:99"), "device: got cuda:99"),
        (Options(dtype="fp8"), "dtype: got 'fp8'"),
        (Options(steps=0), "steps: got 0"),
        (Options(seqlen=1), "seqlen: got 1"),
        (Options(device="cpu", size="tiny", impl="nothing"), "impl: got 'nothing'"),
        (Options(device="cpu", size="tiny", impl="triton_decode"), "impl: got triton_decode"),
    ],
)
def test_wrong_options_are_named(options: Options, message: str) -> None:
    with pytest.raises(TilewiseError, match=message):
        run(options)


def test_differences_are_against_pytorch_and_not_a_number_wins() -> None:
    curves = Curves({"tilewise": (3.0, 2.0, 1.0), "torch": (3.0, 2.5, 1.1), "short": (3.25,)})
    assert curves.differences() == {"tilewise": (0.5, 1), "short": (0.25, 0)}
    assert curves.max_difference == 0.5
    broken = Curves({"tilewise": (3.0, math.nan), "torch": (2.0, 2.0)})
    assert broken.max_difference is not None
    assert math.isnan(broken.max_difference)
    assert not broken.finite
    assert Curves({"tilewise": (1.0,)}).max_difference is None


def test_sparkline_falls_with_the_loss() -> None:
    line = Curves({"tilewise": tuple(float(n) for n in range(100, 0, -1))}).sparkline(width=10)
    assert len(line) == 10
    assert line[0] == "█"
    assert line[-1] == "▁"
    assert list(line) == sorted(line, reverse=True)


@pytest.mark.parametrize("shape", [(32, 96), (96, 32), (48, 48)])
def test_muon_makes_updates_nearly_orthogonal(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_the_schedule_warms_up_and_cools_down() -> None:
    shares = [schedule(step, 200) for step in range(200)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == pytest.approx(1.0, abs=0.02)
    assert shares[-1] == pytest.approx(0.05, abs=0.001)


def test_the_demo_uses_the_public_interface_only() -> None:
    for file in Path(tilewise.demo.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in (n for n in names if n.startswith("tilewise")):
                # what an error is called and which package an extra installs say nothing of attention
                public = name in ("tilewise", "tilewise.core.errors", "tilewise.core.optional")
                public = public or name.startswith("tilewise.demo")
                assert public, f"{file.name} imports {name}"
