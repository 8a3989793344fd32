"""The command line: what it prints, its exit codes, and that a formula on it is read, never run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise
from tests import fresh
from tests.commands import RUNNER, call, data, refusal
from tilewise.cli.app import build
from tilewise.cli.expression import MAX_TEXT, NAMES, read_mask, read_score
from tilewise.core.errors import FormulaError, InputError
from tilewise.formula import grids, library, scores

COMMANDS = ("demo", "generate", "chat", "convert", "why", "explain", "bench", "roofline", "tune-quant")


# The program


def test_help_in_a_process_of_its_own_is_plain_and_names_every_command() -> None:
    command = [sys.executable, "-m", "tilewise.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in COMMANDS)
    assert not set("│╭─\x1b") & set(done.stdout)
    assert not done.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; from tilewise.cli import main; main()"
    done = fresh.run(program)
    assert done.returncode == 2
    assert done.stderr == "tilewise: the command line needs typer and rich: pip install 'tilewise[cli]'\n"
    assert not done.stdout


def test_without_tokenizers_the_demo_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install 'tilewise[demo]'" in refusal("demo", "--size", "tiny", "--steps", "1", "--json")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    text = call(command, "--help")
    assert "Example: tilewise" in text or command == "explain"
    assert len(text) > 300


def test_the_program_says_of_itself_what_the_readme_says() -> None:
    first = (Path(__file__).parent.parent / "README.md").read_text().splitlines()[1].strip("*")
    assert first in " ".join(call("--help").split())


def test_rich_help_has_the_same_commands() -> None:
    result = RUNNER.invoke(build(rich=True), ["--help"])
    assert result.exit_code == 0
    assert all(name in result.stdout for name in COMMANDS)


def test_version() -> None:
    assert call("--version") == f"tilewise {tilewise.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [("frobnicate",), ("why", "--batch", "0"), ("why", "--frob"), ("bench", "--seqlen", "x"), ("demo", "x")],
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...]) -> None:
    assert "Error" in refusal(*arguments)


# Formulas


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("causal", tilewise.causal),
        ("causal & window(1024)", tilewise.causal & tilewise.window(1024)),
        ("~causal | window(left=None, right=3)", ~tilewise.causal | tilewise.window(None, 3)),
        ("neighborhood((4, 4), [3, 3])", tilewise.neighborhood((4, 4), (3, 3))),
        ("neighborhood((9, 8), 4, stride=2, causal=True)", tilewise.neighborhood((9, 8), 4, stride=2, causal=True)),
        ('sliding_tile((6, 8), 2, (3, 1), order="raster")', tilewise.sliding_tile((6, 8), 2, (3, 1), order="raster")),
    ],
)
def test_masks_are_read(text: str, expected: tilewise.Mask) -> None:
    assert read_mask(text) == expected


def test_lists_become_tensors_where_a_tensor_is_wanted() -> None:
    mask, score = read_mask("document([0] * 3 + [1] * 2)"), read_score("softcap(30) >> alibi([0.5, -0.25])")
    assert mask is not None
    assert score is not None
    assert mask.tensors[0].tolist() == [0, 0, 0, 1, 1]
    assert score.tensors[0].tolist() == [0.5, -0.25]
    assert read_mask(None) is None


def test_every_name_of_the_library_is_known() -> None:
    helpers = {"Mask", "Score", "mask", "score", "tree_times", "TokenOrder"}
    masks_and_scores = {*vars(library), *vars(grids), *vars(scores)} & set(tilewise.__all__) - helpers
    assert masks_and_scores == set(NAMES)


def test_captured_tensors_of_a_mask_are_made_where_the_call_is() -> None:
    (places,) = read_mask('sliding_tile((5, 5), 2, 1, order="hilbert")', "meta").tensors
    assert places.device.type == "meta"


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "__import__('os').system('true')",
        "().__class__.__base__",
        "causal.expr",
        "causal.__init__.__globals__",
        "(lambda: causal)()",
        "[x for x in [1]]",
        "window(open('/etc/passwd'))",
        "window(*[3])",
        "window(**{})",
        "library.causal",
        "tree_times([0])",
        "mask(1)",
        "torch",
        "causal if True else causal",
        "causal and causal",
        "(causal := 1)",
        "f'{causal}'",
        "causal[0]",
        "causal >> causal",
        "causal + causal",
        "causal & 1",
        "window",
        "window()",
        "window(1, 2, 3)",
        "softcap(3)",
        "1",
        "10 ** 10",
        "document([0] * 100000000)",
        "document([0] * 1048576 * 2)",
        "document([[0], [1, 2]])",
        "document([None])",
        "causal; causal",
        "import os",
        "causal &",
        "",
        "causal" + " & causal" * 2000,
        "(" * 300 + "causal" + ")" * 300,
        " " * (MAX_TEXT + 1),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(FormulaError):
        read_mask(text)


def test_the_library_s_own_checks_hold() -> None:
    with pytest.raises(InputError, match="window left"):
        read_mask("window(-1)")


def test_a_refused_formula_ends_with_2(tmp_path: Path) -> None:
    target = tmp_path / "made"
    message = refusal("why", "--mask", f"__import__('os').mkdir('{target}')")
    assert "expected" in message
    assert "library's functions" in message
    assert not target.exists()


# why


def test_why_names_the_implementation_and_the_unmet_needs() -> None:
    text = call("why", "--device", "cpu", "--mask", "causal & window(64)", "--heads-q", "8", "--heads-kv", "2")
    lines = text.splitlines()
    assert "q (1, 1024, 8, 128), k (1, 1024, 2, 128)" in lines[0]
    assert [line.split()[1] for line in lines if line.startswith(">")] == ["cpu_tiled"]
    assert any("cpu_sdpa" in line and "takes no score formula" in line for line in lines)
    assert "need a CUDA GPU" in lines[-1]
    assert ("triton" in text, "triton" in call("why", "--device", "cpu", "--all")) == (False, True)


def test_why_agrees_with_the_library() -> None:
    q, k, v = torch.empty(2, 5, 4, 16), torch.empty(2, 9, 2, 16), torch.empty(2, 9, 2, 8)
    expected = tilewise.why(q, k, v, mask=tilewise.causal, score=tilewise.softcap(2.0), dropout=0.1, seed=0)
    shape = ("-b2", "--seqlen-q=5", "--seqlen-k=9", "--heads-q=4", "--heads-kv=2", "--head-dim=16", "--head-dim-v=8")
    rest = ("--device=cpu", "--mask=causal", "--score=softcap(2.0)", "--with=dropout", "--with=no-grad")
    found = data("why", *shape, *rest)
    assert found["chosen"] == expected.chosen
    assert [(row["name"], row["summary"], row["verdict"]) for row in found["rows"]] == list(expected.rows)


def test_why_says_which_call_it_is_about() -> None:
    first = [call("why", *more).splitlines()[0] for more in ((), ("--device=cpu",), ("--device=cpu", "--mask=causal"))]
    assert [line.startswith("example call: q (1, 1024, 8, 128)") for line in first] == [True, True, False]
    assert [line.rpartition(", mask ")[2] for line in first] == ["none", "none", "causal"]


def test_why_of_an_implementation_and_of_a_scheme() -> None:
    assert "available only with --impl reference" in call("why", "--device=cpu")
    assert data("why", "--device=cpu", "--impl=reference")["chosen"] == "reference"
    assert data("why", "--device=cpu", "--impl=hopper", code=1)["chosen"] is None
    assert "impl: got 'nope'" in refusal("why", "--device=cpu", "--impl=nope")
    assert data("why", "--device=cpu", "--quantize=Sage2()")["chosen"] == "cpu_codes"
    assert "scheme: got 'Sage9()'" in refusal("why", "--device=cpu", "--quantize=Sage9()")


def test_why_packed_and_sink() -> None:
    assert "q (12, 8, 128)" in call("why", "--device", "cpu", "--packed", "7,0,5", "--with", "sink")
    assert "--packed" in refusal("why", "--device", "cpu", "--packed", "7,x")


def test_why_passes_every_circumstance_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def why(q: torch.Tensor, *tensors: torch.Tensor, **arguments: Any) -> tilewise.Explanation:
        seen.update(arguments, requires_grad=q.requires_grad)
        return tilewise.Explanation(None, (("none", "nothing", "cannot"),))

    monkeypatch.setattr(tilewise, "why", why)
    call("why", "--device", "cpu", code=1)
    assert (seen["sink"], seen["dropout"], seen["deterministic"], seen["requires_grad"]) == (None, 0.0, False, True)
    every = [f"--with={name}" for name in ("sink", "dropout", "deterministic", "batch-invariant", "no-grad")]
    assert data("why", "--device", "cpu", *every, code=1)["chosen"] is None
    assert seen["sink"].shape == (8,)
    assert (seen["dropout"] > 0, seen["deterministic"], seen["requires_grad"]) == (True, True, False)
    assert seen["batch_invariant"]


def test_errors_of_the_library_end_with_2() -> None:
    assert "num_heads" in refusal("why", "--device", "cpu", "--heads-q", "8", "--heads-kv", "3")
    assert "--device" in refusal("why", "--device", "abacus")


# explain


def test_explain_lists_the_ladder_and_runs_a_rung() -> None:
    from tilewise.explain.ladder import ORDER, climb

    listing = call("explain")
    assert all(name in listing for name in ORDER)
    assert call("explain", "ladder", "matmul_tiled", "--size", "8") == f"{climb('matmul_tiled', size=8)}\n"
    (found,) = data("explain", "ladder", "matmul_tiled", "-o", "tile=8")
    assert found["loads"] == found["formula_loads"] == 2 * 32**3 // 8
    assert len(data("explain", "ladder", "--size", "8")) == len(ORDER)


@pytest.mark.parametrize(
    "arguments", [("nothing",), ("matmul_tiled", "-o", "tile"), ("-o", "tile=4"), ("matmul_naive", "-o", "tile=4")]
)
def test_explain_ladder_refuses(arguments: tuple[str, ...]) -> None:
    refusal("explain", "ladder", *arguments)


def test_explain_lists_methods_of_guessing_and_runs_one() -> None:
    from tilewise.explain.guesses import ORDER, play

    listing = call("explain")
    assert all(name in listing for name in ORDER)
    table = call("explain", "guesses", "--count", "5").splitlines()
    assert len(table) == 2 + len(ORDER)
    assert "WRONG" not in "".join(table)
    (found,) = data("explain", "guesses", "prompt_copy", "--words", "6", "--seed", "3")
    assert found["forwards"] == found["predicted"] == play("prompt_copy", words=6, seed=3).forwards
    assert "def copied(" in call("explain", "guesses", "prompt_copy", "--source")
    assert "method" in refusal("explain", "guesses", "copying")
    refusal("explain", "guesses", "--letters", "2")


def test_explain_mask_draws_tiles_in_text_and_in_a_file(tmp_path: Path) -> None:
    out = tmp_path / "mask.svg"
    text = call("explain", "mask", "--mask", "causal", "--seqlen", "256", "--out", str(out))
    assert "▒▒······\n██▒▒····\n████▒▒··\n██████▒▒\n" in text
    assert "visits 10 of 16 tiles" in text
    assert out.read_text(encoding="utf-8").startswith("<?xml")
    found = data("explain", "mask", "-m", "causal", "--seqlen", "256")
    assert (found["empty"], found["partial"], found["full"]) == (6, 4, 6)
    assert refusal("explain", "mask", "--mask=causal", "--out", str(tmp_path / "mask.txt"))
    missing = tmp_path / "missing" / "mask.svg"
    for command in (("mask", "--mask=causal"), ("ladder", "matmul_tiled")):
        assert "folder" in refusal("explain", *command, "--out", str(missing))
    assert not missing.parent.exists()


def test_explain_mask_takes_its_argument_for_one_release_more() -> None:
    done = RUNNER.invoke(build(rich=False), ["explain", "mask", "causal", "--seqlen", "256"])
    assert done.exit_code == 0
    assert done.stdout == call("explain", "mask", "--mask", "causal", "--seqlen", "256")
    assert "deprecated: write --mask 'causal'" in done.stderr
    assert "Deprecated: write --mask EXPRESSION" in call("explain", "mask", "--help")
    assert "--mask: got none" in refusal("explain", "mask")
    assert "--mask: got an argument and --mask" in refusal("explain", "mask", "causal", "--mask", "causal")


def test_explain_plan_shares_evenly(tmp_path: Path) -> None:
    out = tmp_path / "plan.svg"
    text = call("explain", "plan", "100,4000,2*64", "--programs", "5", "--heads-kv", "2", "--out", str(out))
    assert "4 requests" in text
    assert out.read_text(encoding="utf-8").startswith("<?xml")
    found = data("explain", "plan", "100,4000,2*64", "--programs", "5", "--heads-kv", "2")
    shares = [sum(s["end"] - s["first"] for s in program) for program in found["programs"]]
    assert sum(shares) == found["tiles"] == 2 * (2 + 63 + 1 + 1)
    assert max(shares) - min(shares) <= 1
    assert found["merges"]
    sharing = ("explain", "plan", "500,510,505,490", "--heads-kv", "8", "--shared", "480", "--programs", "4")
    shared = data(*sharing)
    assert (shared["prefixes"]["tiles"], shared["tiles"]) == (8 * 7, 8 * 4)
    assert len(shared["merges"]) == 8 * 4
    assert all(merge["prefix"] for merge in shared["merges"])
    assert data(*sharing, "--shared", "63")["tiles"] == 8 * 4 * 8
    assert "0: requests from 0 head 0 tiles 0-6" in call(*sharing)
    assert "begin at key 0" in refusal(*sharing, "--mask", "causal & window(64)")
    windowed = data("explain", "plan", "4000", "--programs", "5", "--mask", "causal & window(128)")
    assert windowed["tiles"] < found["tiles"]
    refusal("explain", "plan", "100,-4")


def test_explain_traffic_favours_the_later_algorithm() -> None:
    moved = {row["algorithm"]: row["bytes"] for row in data("explain", "traffic")}
    assert moved["FlashAttention-2"] < moved["materialised"]
    assert "FlashAttention-2" in call("explain", "traffic")


# roofline


def test_roofline_agrees_with_the_library() -> None:
    from tilewise.explain.roofline import Problem, estimate

    problem = Problem(2048, 2048, 2, 16, 4, 64, causal=True, dtype="fp16", direction="backward")
    expected = estimate(problem, "A100")
    shape = ("--gpu=a100", "-b2", "--seqlen-q=2048", "--heads-q=16", "--heads-kv=4", "--head-dim=64")
    rest = ("--causal", "--dtype=fp16", "--direction=backward")
    found = data("roofline", *shape, *rest, "--measured-ms=1.5")
    assert (found["flops"], found["bytes"]) == (expected.flops, expected.bytes)
    assert found["floor_seconds"] == expected.floor_seconds
    assert found["efficiency"] == pytest.approx(expected.floor_seconds / 1.5e-3)
    assert call("roofline", *shape, *rest) == f"{expected}\n"


def test_roofline_decodes_one_query_and_a_window_reads_its_keys_only() -> None:
    decode = data("roofline", "--gpu", "H100-SXM", "--direction", "decode", "--seqlen-k", "8192")
    assert decode["problem"]["seqlen_q"] == 1
    assert decode["bound"] == "memory"
    window = data("roofline", "--gpu", "H100-SXM", "--direction", "decode", "--seqlen-k", "8192", "--window", "512")
    assert window["bytes"] < decode["bytes"] / 10


def test_roofline_lists_gpus_and_refuses_others() -> None:
    assert "H100-SXM" in call("roofline", "--gpus")
    assert any(row["name"] == "H200" for row in data("roofline", "--gpus"))
    assert "abacus" in refusal("roofline", "--gpu", "abacus")
    assert refusal("roofline", "--gpu", "V100", "--dtype", "fp8")
    assert refusal("roofline", "--measured-ms", "0")
