"""`tilewise tune-quant`: dumps that are read, errors that name the file, and what is said and chosen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tilewise as tw
from tests.commands import call, data, refusal
from tilewise.cli.dumps import load
from tilewise.core.errors import InputError
from tilewise.explain.accuracy import SCHEMES, name_of, try_schemes
from tilewise.quant.schemes import parse_scheme

QUICK = ("--device=cpu", "--seconds=0.01")


def tensors(batch: int = 1, seqlen: int = 40, heads: int = 2, dim: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(batch, seqlen, heads, dim, generator=generator) for name in "qkv"}


# schemes


@pytest.mark.parametrize("scheme", [*SCHEMES, tw.Sage(smooth=()), tw.Sage(smooth=("v",), pv_flush=3)], ids=name_of)
def test_schemes_are_read_as_they_are_written(scheme: Any) -> None:
    assert parse_scheme(name_of(scheme)) == scheme


# dumps


def test_dumps_of_every_form_hold_the_same(tmp_path: Path) -> None:
    held = tensors()
    torch.save({**held, "other": torch.zeros(1)}, tmp_path / "dict.pt")
    torch.save(tuple(held.values()), tmp_path / "tuple.pth")
    torch.save([x.transpose(1, 2) for x in held.values()], tmp_path / "first.pt")
    files = {"dict.pt": False, "tuple.pth": False, "first.pt": True}
    save_file(held, tmp_path / "layer.safetensors")
    for name, heads_first in {**files, "layer.safetensors": False}.items():
        found = load(tmp_path / name, heads_first)
        assert all(torch.equal(x, y) for x, y in zip(found, held.values(), strict=True)), name


def test_bad_dumps_are_named(tmp_path: Path) -> None:
    held = tensors()
    bad: dict[str, Any] = {
        "the keys q, k and v": {"q": held["q"]},
        "a dict or a tuple": [held["q"]] * 2,
        "tensors \\(batch, seqlen": {**held, "k": held["k"][0]},
        "x\\[None\\]": {**held, "v": 1.0},
        "of q, k and v": 3,
    }
    for message, content in bad.items():
        torch.save(content, tmp_path / "bad.pt")
        with pytest.raises(InputError, match=message) as caught:
            load(tmp_path / "bad.pt", False)
        assert "bad.pt" in str(caught.value)
    (tmp_path / "bad.pt").write_bytes(b"not a dump")
    (tmp_path / "bad.safetensors").write_bytes(b"not a dump")
    (tmp_path / "bad.npz").write_bytes(b"")
    for name, message in (("bad.pt", "a file of tensors"), ("bad.safetensors", "a file of tensors"),
                          ("bad.npz", "a name ending in"), ("none.pt", "no such file")):  # fmt: skip
        assert message in refusal("tune-quant", str(tmp_path / name))


class Runs:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_in_a_dump_is_run(tmp_path: Path) -> None:
    torch.save({"q": Runs(tmp_path / "written")}, tmp_path / "bad.pt")
    assert "tensors alone" in refusal("tune-quant", str(tmp_path / "bad.pt"))
    assert not (tmp_path / "written").exists()


def test_without_safetensors_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    (tmp_path / "layer.safetensors").touch()
    assert "tilewise[engine]" in refusal("tune-quant", str(tmp_path / "layer.safetensors"))


# the command


@pytest.fixture
def layers(tmp_path: Path) -> tuple[str, str]:
    """A layer, and one whose second head has channels far from 0."""
    held = tensors(seqlen=200)
    torch.save(held, tmp_path / "0.pt")
    held["k"][:, :, 1, 3] += 60.0
    torch.save({name: x.transpose(1, 2) for name, x in held.items()}, tmp_path / "1.pt")
    return str(tmp_path / "0.pt"), str(tmp_path / "1.pt")


def test_it_says_what_the_library_says(layers: tuple[str, str]) -> None:
    asked = ("--scheme=Sage2()", "--scheme=FP8()", "--mask=window(50)", "--rows=32", "--scale=0.2", *QUICK)
    found = data("tune-quant", layers[0], *asked)
    q, k, v = load(Path(layers[0]), False)
    want = try_schemes(q, k, v, (tw.Sage2(), tw.FP8()), mask=tw.window(50), rows=32, scale=0.2)
    (layer,) = found["layers"]
    assert [trial["scheme"] for trial in layer["trials"]] == ["as they are", "Sage2()", "FA3FP8()"]
    for got, trial in zip(layer["trials"], want.ran, strict=True):
        assert (got["cosine"], got["relative_l1"]) == (trial.accuracy.cosine, trial.accuracy.relative_l1)
        assert (got["heads"], got["nbytes"]) == (list(trial.accuracy.heads), trial.nbytes)
        assert got["worst_head"] == trial.accuracy.worst_head
        assert got["ms"] is None, "the CPU emulates: its times are of other work"
    assert found["ranked_by"] == "bits"
    assert found["mask"] == "window(50)"


def test_each_head_gets_its_own(layers: tuple[str, str]) -> None:
    asked = ("--layout=bhsd", "--scheme=FP8()", "--scheme=Sage2()", "--per-head", "--max-error=0.12", *QUICK)
    (layer,) = data("tune-quant", layers[1], *asked)["layers"]
    fp8, sage = (trial["heads"] for trial in layer["trials"][1:])
    assert fp8[0] < 0.12 < fp8[1], "the head whose channels are far from 0 needs them centred"
    assert max(sage) < 0.12
    assert layer["chosen_by_head"] == ["FA3FP8()", "Sage2()"]
    text = call("tune-quant", layers[1], *asked)
    assert "within 0.12, head 0: FA3FP8()\nwithin 0.12, head 1: Sage2()\n" in text
    assert "No GPU, so nothing is timed" in text
    assert "the cheapest scheme within 0.12, which need not be the fastest" in text
    assert "synthetic" not in text


def test_several_layers_and_none_that_fits(layers: tuple[str, str]) -> None:
    text = call("tune-quant", *layers[:1] * 2, "--scheme=Sage2()", "--causal", "--max-error=1e-9", *QUICK, code=1)
    assert text.count("within 1e-09, all heads: no scheme") == 2
    assert not [line for line in text.splitlines() if line.startswith(">")]
    found = data("tune-quant", layers[0], "--scheme=Sage2()", "--max-error=1e-9", *QUICK, code=1)
    assert found["layers"][0]["chosen"] is None


def test_what_is_left_out_says_why(tmp_path: Path) -> None:
    torch.save(tensors(dim=12), tmp_path / "layer.pt")
    asked = ("--scheme=Sage2()", "--scheme=Sage(rotate=hadamard)", *QUICK)
    text = call("tune-quant", str(tmp_path / "layer.pt"), *asked)
    assert "left out: Sage(rotate=hadamard): q: got head_dim 12; expected a power of 2" in text


def test_wrong_usage(layers: tuple[str, str], tmp_path: Path) -> None:
    held = tensors()
    torch.save({**held, "k": held["k"][..., :7]}, tmp_path / "odd.pt")
    for arguments, message in (
        ((), "files, or --demo"),
        ((layers[0], "--demo"), "files, or --demo"),
        ((layers[0], "--causal", "--mask=causal"), "one of them"),
        (("--demo", "--causal"), "layers are causal"),
        ((layers[0], "--scheme=Sage(qk=int3)"), "Sage(qk=int3)"),
        ((str(tmp_path / "odd.pt"),), "odd.pt: "),
    ):
        assert message in refusal("tune-quant", *arguments, *QUICK)


def test_the_demo_s_layers_tell_schemes_apart() -> None:
    four, eight, rotated = "Sage2(int4)", "Sage2()", "Sage(rotate=hadamard)"
    found = data("tune-quant", "--demo", "--rows=64", *(f"--scheme={name}" for name in (four, eight, rotated)), *QUICK)
    topics, outliers = (
        {trial["scheme"]: trial["relative_l1"] for trial in layer["trials"]} for layer in found["layers"]
    )
    assert [layer["name"] for layer in found["layers"]] == ["demo: topics", "demo: outliers"]
    assert "synthetic layers" in call("tune-quant", "--demo", "--rows=8", f"--scheme={eight}", *QUICK)
    assert topics[four] < 0.05 < outliers[four], "4 bits do not bear outliers"
    assert outliers[rotated] < 0.9 * outliers[eight] < 0.2 * outliers[four]
    assert all(layer["chosen"] in (eight, rotated, four) for layer in found["layers"])
    assert found["layers"][1]["chosen"] != four
