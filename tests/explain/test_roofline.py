"""Work and traffic equal brute force; bound and floor follow from them."""

import itertools

import numpy as np
import pytest

from tilewise.core.errors import InputError, UnsupportedError
from tilewise.explain import roofline
from tilewise.explain.roofline import Problem

LIMITS = (None, -3, 0, 1, 2, 5, 40)


@pytest.mark.parametrize("seqlen_q", [1, 4, 9])
@pytest.mark.parametrize("seqlen_k", [1, 5, 9, 12])
def test_visible_pairs_and_keys_by_brute_force(seqlen_q: int, seqlen_k: int) -> None:
    i = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = np.arange(seqlen_k)
    for left, right in itertools.product(LIMITS, LIMITS):
        visible = np.ones((seqlen_q, seqlen_k), dtype=bool)
        if left is not None:
            visible &= j > i - left
        if right is not None:
            visible &= j <= i + right
        assert roofline.visible_pairs(seqlen_q, seqlen_k, left, right) == visible.sum(), (left, right)
        assert roofline.visible_keys(seqlen_q, seqlen_k, left, right) == visible.any(axis=0).sum(), (left, right)


def test_flops_by_the_usual_conventions() -> None:
    sizes = {"batch": 2, "num_heads_q": 16, "head_dim": 128}
    full = Problem(8192, **sizes)
    assert full.flops() == 4 * 2 * 16 * 8192**2 * 128
    causal = Problem(8192, causal=True, **sizes)
    assert causal.flops() == 4 * 2 * 16 * 128 * (8192 * 8193 // 2)
    assert Problem(8192, direction="backward", **sizes).flops() == 2.5 * full.flops()
    assert Problem(8192, window=(1024, 0), **sizes).visible_pairs() == 8192 * 1024 - 1023 * 1024 // 2
    assert (
        Problem(8192, window=(1024, None), causal=True, **sizes).flops()
        == Problem(8192, window=(1024, 0), **sizes).flops()
    )
    assert Problem(64, head_dim=192, head_dim_v=128).flops() == 2 * 64 * 64 * (192 + 128)


def test_bytes() -> None:
    forward = Problem(10, 30, batch=2, num_heads_q=4, num_heads_kv=2, head_dim=8, head_dim_v=16)
    q, k, v, o = 2 * 4 * 10 * 8, 2 * 2 * 30 * 8, 2 * 2 * 30 * 16, 2 * 4 * 10 * 16
    lse = 2 * 4 * 10 * 4
    assert forward.bytes() == 2 * (q + k + v + o) + lse
    sizes = {"batch": 2, "num_heads_q": 4, "num_heads_kv": 2, "head_dim": 8, "head_dim_v": 16}
    backward = Problem(10, 30, direction="backward", **sizes)
    assert backward.bytes() == 2 * 2 * (q + k + v + o) + lse  # o with do; dq, dk, dv like q, k, v
    assert Problem(10, 30, dtype="fp8", **sizes).bytes() == q + k + v + o + lse


def test_decode_reads_only_the_visible_window() -> None:
    whole = Problem.decode(4096, batch=3, num_heads_q=8, num_heads_kv=2)
    assert (whole.seqlen_q, whole.direction, whole.visible_keys()) == (1, "decode", 4096)
    windowed = Problem(1, 4096, 3, 8, 2, window=(512, 0), direction="decode")
    assert windowed.visible_keys() == 512
    assert windowed.bytes() < whole.bytes() / 7


def test_bound_and_floor() -> None:
    prefill = roofline.estimate(Problem(8192, batch=2, num_heads_q=16), "H200")
    assert prefill.bound == "compute"
    assert prefill.floor_seconds == prefill.flops / 989.4e12
    assert prefill.attainable == pytest.approx(989.4e12)
    decode = roofline.estimate(Problem.decode(8192, batch=16, num_heads_q=32, num_heads_kv=8), "NVIDIA H200")
    assert decode.bound == "memory"
    assert decode.floor_seconds == decode.bytes / 4.8e12
    assert decode.attainable == pytest.approx(decode.intensity * 4.8e12)
    assert decode.intensity < decode.gpu.ridge("bf16") < prefill.intensity
    assert decode.efficiency(2 * decode.floor_seconds) == pytest.approx(0.5)


def test_intensity_of_decoding_is_the_group_size() -> None:
    # Each 16-bit element of K and V serves one multiply-add for each query head of its group: group FLOP per byte.
    for group in (1, 4, 8):
        point = roofline.estimate(Problem.decode(1 << 20, num_heads_q=8, num_heads_kv=8 // group), "A100")
        assert point.intensity == pytest.approx(group, rel=1e-4)


def test_work_counted_elsewhere_has_a_floor_too() -> None:
    point = roofline.estimate(roofline.Work(3_000, 4_800), "H200")
    assert (point.bound, point.floor_seconds, point.intensity) == ("memory", 1e-9, 3_000 / 4_800)
    point = roofline.estimate(roofline.Work(989_400_000, 1, "bf16"), "H200")
    assert (point.bound, point.floor_seconds) == ("compute", pytest.approx(1e-6))
    for bad in ({"operations": 0}, {"moved": -1}, {"dtype": "float32"}):
        (name,) = bad
        with pytest.raises(InputError, match=name):
            roofline.Work(**{"operations": 8, "moved": 8, **bad})  # type: ignore[arg-type]


def test_text_has_every_figure() -> None:
    text = str(roofline.estimate(Problem(1024, causal=True), "RTX 4090"))
    for word in ("RTX 4090", "GFLOP", "MB", "FLOP/byte", "ridge", "bound", "floor time", "µs"):
        assert word in text


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seqlen_q": 0}, "seqlen_q"),
        ({"seqlen_k": -1}, "seqlen_k"),
        ({"num_heads_q": 6, "num_heads_kv": 4}, "num_heads_q"),
        ({"dtype": "float16"}, "dtype"),
        ({"direction": "sideways"}, "direction"),
    ],
)
def test_bad_input(changes: dict[str, object], name: str) -> None:
    with pytest.raises(InputError, match=name):
        Problem(**{"seqlen_q": 8, **changes})  # type: ignore[arg-type]


def test_types_a_gpu_lacks() -> None:
    with pytest.raises(UnsupportedError, match="fp8"):
        roofline.estimate(Problem(8, dtype="fp8"), "A100")
    with pytest.raises(InputError, match="gpu"):
        roofline.estimate(Problem(8), "abacus")
