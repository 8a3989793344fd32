"""`tilewise tune-sparse` and `tune-windows`: what they write, what they go on with, and what a model does with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.commands import call, data, refusal
from tests.explain.test_sparsity import coherent, many_small_weights
from tilewise.core.errors import InputError
from tilewise.explain import sparsity

QUICK = ("--device=cpu", "--seconds=0.01")
GRID = ("--canvas=4,8,8", "--tile=2,4,4", "--text=3")


@pytest.fixture
def layers(tmp_path: Path) -> tuple[str, ...]:
    """Two layers' files and that of the result."""
    for n in range(2):
        torch.save(dict(zip("qkv", coherent(seqlen=128, seed=n), strict=True)), tmp_path / f"layer{n}.pt")
    return str(tmp_path / "layer0.pt"), str(tmp_path / "layer1.pt"), f"--out={tmp_path / 'found.json'}", *QUICK


@pytest.fixture
def videos(tmp_path: Path) -> tuple[str, ...]:
    torch.manual_seed(0)
    for n in range(2):
        torch.save(tuple(torch.randn(1, 259, 2, 16) for _ in "qkv"), tmp_path / f"video{n}.pt")
    return str(tmp_path / "video0.pt"), str(tmp_path / "video1.pt"), f"--out={tmp_path / 'found.json'}", *QUICK, *GRID


def test_a_model_reads_thresholds_that_keep_the_bound(layers: tuple[str, ...]) -> None:
    shown = call("tune-sparse", *layers, "--causal", "--block=16", "--max-error=0.04")
    found = tw.load_selections(layers[2].removeprefix("--out="))
    assert list(found) == list(layers[:2])
    assert "2 layers" in shown
    more = call(
        "tune-sparse",
        layers[0],
        f"{layers[2]}.2",
        *QUICK,
        "--block=16,32",
        "--far=summary2",
        "--lam=12",
        "--mask=causal",
    )
    assert "1 layer," in more
    (arguments,) = tw.load_selections(f"{layers[2].removeprefix('--out=')}.2").values()
    given = arguments["select"]
    assert (given.block, given.far, given.skip) == ((16, 32), "summary2", 12.0)
    for path, arguments in found.items():
        assert arguments["select"].block == (16, 16)
        q, k, v = torch.load(path).values()
        exact = tw.attention(q, k, v, mask=tw.causal)
        errors = sparsity.by_head(tw.attention(q, k, v, mask=tw.causal, **arguments), exact)
        assert float(errors.max()) <= 0.04
        assert tw.select_tiles(q, k, arguments["select"], mask=tw.causal).density() < 0.9


def test_lam_is_of_heads_that_keep_the_bound_with_it(tmp_path: Path) -> None:
    q, k, v = many_small_weights()
    path, out = tmp_path / "layer.pt", tmp_path / "found.json"
    torch.save({"q": q, "k": k, "v": v}, path)
    document = data("tune-sparse", str(path), f"--out={out}", *QUICK, "--lam=0.5")
    assert document["layers"][0]["found"]["lams"] == [False, True]
    (arguments,) = tw.load_selections(out).values()
    assert arguments["select"].skip == (sparsity.NO_LAM, 0.5)
    errors = sparsity.by_head(tw.attention(q, k, v, **arguments), tw.attention(q, k, v))
    assert float(errors.max()) <= 0.05
    torch.testing.assert_close(errors, torch.tensor(document["layers"][0]["found"]["errors"]))


def test_who_was_stopped_goes_on(layers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    fit = sparsity.fit_sparge

    def counted(q: torch.Tensor, *rest: Any, **more: Any) -> Any:
        looked.append(1)
        if len(looked) == 2:
            raise KeyboardInterrupt
        return fit(q, *rest, **more)

    monkeypatch.setattr(sparsity, "fit_sparge", counted)
    call("tune-sparse", *layers, "--block=16", code=130)
    path = Path(layers[2].removeprefix("--out="))
    assert [layer["name"] for layer in json.loads(path.read_text())["layers"]] == [layers[0]]
    document = data("tune-sparse", *layers, "--block=16")
    assert len(looked) == 3, "the first layer is not looked at again"
    assert [layer["name"] for layer in document["layers"]] == list(layers[:2])
    data("tune-sparse", *layers, "--block=16")
    assert len(looked) == 3
    torch.save(coherent(seqlen=64), layers[0])
    document = data("tune-sparse", *layers, "--block=16")
    assert len(looked) == 4, "a file that has changed is"
    assert len(document["layers"]) == 2


def test_other_settings_are_not_mixed(layers: tuple[str, ...]) -> None:
    call("tune-sparse", *layers, "--block=16,32")
    assert "max_error" in refusal("tune-sparse", *layers, "--block=16,32", "--max-error=0.1")
    assert "block" in refusal("tune-sparse", *layers, "--block=32")


def test_a_model_reads_windows_within_the_budget(videos: tuple[str, ...]) -> None:
    document = data("tune-windows", *videos, "--budget=0.4")
    shares = [x for layer in document["layers"] for x in layer["found"]["density"]]
    assert len(shares) == 4
    assert sum(shares) / 4 <= 0.4
    found = tw.load_selections(videos[2].removeprefix("--out="))
    order = tw.TokenOrder((4, 8, 8), (2, 4, 4), text=3)
    for (path, arguments), layer in zip(found.items(), document["layers"], strict=True):
        q, k, v = torch.load(path)
        o, exact = (tw.attention(q, k, v, impl="reference", **more) for more in (arguments, {}))
        torch.testing.assert_close(
            sparsity.by_head(o, exact), torch.tensor(layer["found"]["errors"]), rtol=1e-3, atol=1e-5
        )
        assert len(order.index) == q.shape[1]


def test_another_budget_needs_no_other_pass(videos: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    windows = ("--window=1,1,1", "--window=2,2,2")
    little = data("tune-windows", *videos, *windows, "--budget=0.2")
    monkeypatch.delattr(sparsity, "window_losses")
    much = data("tune-windows", *videos, *windows, "--budget=1")
    assert [layer["mask"]["windows"] for layer in much["layers"]] == [[[2, 2, 2]] * 2] * 2
    assert [layer["mask"]["windows"] for layer in little["layers"]] == [[[1, 1, 1]] * 2] * 2
    assert max(x for layer in much["layers"] for x in layer["found"]["lost"]) < 1e-6


def test_what_is_wrong_is_said(layers: tuple[str, ...], videos: tuple[str, ...]) -> None:
    assert "--demo" in refusal("tune-sparse", *QUICK)
    assert "--causal" in refusal("tune-sparse", *layers, "--causal", "--mask=causal")
    assert "--tile" in refusal("tune-windows", *videos, "--tile=x")
    assert "layer0.pt: q" in refusal("tune-windows", *layers, *GRID)
    assert "--window" in refusal("tune-windows", *videos, "--window=x")
    assert "sliding_tile window" in refusal("tune-windows", *videos, "--window=9,9,9")
    assert "budget" in refusal("tune-windows", *videos, "--budget=0.001")
    assert "no such file" in refusal("tune-sparse", "none.pt", *QUICK)
    assert "max_error" in refusal("tune-sparse", *layers, "--max-error=0")
    for block in ("0", "0,16", "16,0", "16,16,16", "3*16"):
        assert f"--block: got '{block}'; expected one or two integers" in refusal(
            "tune-sparse", *layers, f"--block={block}"
        )


def test_layers_with_nan_are_named(videos: tuple[str, ...]) -> None:
    given = torch.load(videos[0])
    given[0][0, 0, 0, 0] = torch.nan
    torch.save(given, videos[0])
    said = "video0.pt: q: got 1 of 8288 numbers that are NaN or infinite; expected finite numbers"
    assert said in refusal("tune-windows", *videos)
    assert said in refusal("tune-sparse", *videos[: -len(GRID)])


def test_other_files_are_not_selections(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        tw.load_selections(tmp_path / "none.json")
    for content, message in (("{", "tune-windows wrote"), ("[]", "got list"), ('{"format": "x"}', "format 'x'")):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(InputError, match=message):
            tw.load_selections(tmp_path / "bad.json")


def test_the_demo_s_layers_leave_tiles_out(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    document = data("tune-sparse", "--demo", f"--out={out}", *QUICK)
    assert document["settings"]["mask"] == "causal"
    assert all(max(layer["found"]["errors"]) <= 0.05 for layer in document["layers"])
    topics, outliers = (layer["found"]["density"] for layer in document["layers"])
    assert sum(topics) / 4 < 0.6
    assert topics[0] < 0.3
    assert max(outliers) < 0.9
    shown = call("tune-sparse", "--demo", f"--out={out}", *QUICK)
    assert "demo: topics" in shown
    assert "ms" not in shown.splitlines()[1], "a CPU has other kernels for selections than for all tiles"
