from __future__ import annotations

import time

import pytest
import torch

from benchmarks import timing
from benchmarks.memory import MIB, cpu_peak_mib
from benchmarks.reference import head_slice, relative_error, visible_pairs


class HostClock:
    """A clock that only `sleep` moves, so that no other work on the machine shows in a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_contenders_take_turns_and_the_order_rotates() -> None:
    calls: list[str] = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    timed = timing.interleaved(contenders, device="cpu", rounds=3, warmup_ms=0.0)
    assert "".join(calls[3:]) == "abcbcacab"
    assert [len(result.times_ms) for result in timed.values()] == [3, 3, 3]


@pytest.mark.parametrize(
    ("turn_ms", "repeats", "lead"),
    [(0.0, {"a": 1, "b": 1}, timing.WAIT_CYCLES), (120.0, {"a": 12, "b": 4}, timing.LEAD_CYCLES)],
)
def test_turns_on_a_gpu_hold_as_many_calls_as_take_their_time(
    turn_ms: float, repeats: dict[str, int], lead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, dict[str, int], int]] = []

    def rounds(calls: dict[str, timing.Call], count: int, found: dict[str, int], ahead: int) -> dict[str, list[float]]:
        seen.append((count, found, ahead))
        return {name: [1.0] for name in calls}

    monkeypatch.setattr(timing, "_gpu_rounds", rounds)
    monkeypatch.setattr(timing, "_wait", lambda device: None)
    clock = HostClock(monkeypatch)
    calls = {"a": lambda: clock.sleep(0.01), "b": lambda: clock.sleep(0.03)}
    timing.interleaved(calls, device="cuda", rounds=5, warmup_ms=50.0, turn_ms=turn_ms)
    assert seen == [(5, repeats, lead)]
    assert "turns of 120 ms" in timing.method("cuda", 5, turn_ms=120.0)


class Clock:
    """A GPU that does what it is asked at once or, while it `waits`, when it is waited for; its events take a
    millisecond for a call that it waited for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waits = 0.0, False
        clock, zeros = self, torch.zeros

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at, self.reached = 0.0, False

            def record(self) -> None:
                self.at, self.reached = clock.now, not clock.waits

            def query(self) -> bool:
                return self.reached

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch, "zeros", lambda *size, **options: zeros(1))

    def launch(self, ahead: bool) -> None:
        """A call of a millisecond, that the GPU waits five for where the host is not ahead."""
        self.waits = ahead
        self.now += 1.0 if ahead else 6.0


def test_calls_on_a_gpu_that_were_launched_late_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    turns = iter([True] * 3 + [True, False] * 7)  # in time, or not

    def call() -> None:
        ahead = next(turns)
        clock.launch(ahead)

    def start(turn: int) -> None:
        clock.waits = turn < 3 or turn % 2 == 1

    monkeypatch.setattr(timing, "_order", lambda names, turn: (start(turn), names)[1])
    times = timing._gpu_rounds({"call": call}, 17, {"call": 1}, 0)
    assert times == {"call": [1.0] * 10}


def test_late_calls_never_count() -> None:
    late = [(6.0, True)] * 8
    assert timing.in_time([*late, *[(1.0, False)] * timing.FEWEST]) == [1.0] * timing.FEWEST
    assert timing.in_time([*late, (1.0, False)]) == []
    assert timing.in_time([(1.0, False)]) == [1.0]  # all that there is


@pytest.mark.parametrize(("enough", "turns"), [(8, [1, 8]), (10**9, list(timing.LONGER))])
def test_where_calls_are_late_all_take_turns_again_with_the_host_further_ahead(
    enough: int, turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def of_turns(
        calls: dict[str, timing.Call], rounds: int, repeats: dict[str, int], lead: int
    ) -> dict[str, list[tuple[float, bool]]]:
        seen.append(lead)
        return {name: [(1.0, name == "slow" and lead < enough)] * rounds for name in calls}

    monkeypatch.setattr(timing, "_gpu_turns", of_turns)
    monkeypatch.setattr(timing, "_wait", lambda device: None)
    monkeypatch.setattr(timing, "WAIT_CYCLES", 1)
    timed = timing.interleaved({"fast": lambda: None, "slow": lambda: None}, device="cuda", rounds=9, warmup_ms=0.0)
    assert seen == turns
    assert timed["fast"].times_ms == [1.0] * 9
    failed = enough > timing.LONGER[-1]
    assert timed["slow"] == timing.Timed([] if failed else [1.0] * 9, timing.LATE if failed else None)


def test_a_slower_contender_reads_slower() -> None:
    contenders = {"fast": lambda: time.sleep(0.001), "slow": lambda: time.sleep(0.01)}
    timed = timing.interleaved(contenders, device="cpu", rounds=5, warmup_ms=0.0)
    fast, slow = (timed[name].quantiles for name in ("fast", "slow"))
    assert fast is not None
    assert slow is not None
    assert fast[1] >= 1.0
    assert slow[0] >= 10.0


def test_a_contender_that_raises_drops_out_with_its_message() -> None:
    def broken() -> None:
        raise ValueError("cannot do this\nmore")

    timed = timing.interleaved({"broken": broken, "fine": lambda: None}, device="cpu", rounds=2, warmup_ms=0.0)
    assert timed["broken"] == timing.Timed([], "ValueError: cannot do this")
    assert timed["broken"].quantiles is None
    assert timed["fine"].failure is None


def test_quantiles() -> None:
    assert timing.quantiles([float(value) for value in range(11)]) == pytest.approx((2.0, 5.0, 8.0))


def test_host_times_counts_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HostClock(monkeypatch)
    timed = timing.host_times({"sleep": lambda: clock.sleep(0.002)}, device="cpu", rounds=2, repeat=3)
    assert timed["sleep"].times_ms == pytest.approx([2.0, 2.0])


def test_ceilings_are_positive() -> None:
    tflops, gbps = timing.ceilings("cpu", size=64, copy_bytes=2**16)
    assert tflops > 0
    assert gbps > 0


def _prepare(mebibytes: int) -> tuple[timing.Call, timing.Call]:
    def call() -> object:
        block = torch.ones(mebibytes * MIB // 4)
        time.sleep(0.05)
        return block.sum()

    return lambda: torch.ones(1).sum(), call


def test_peak_memory_sees_what_a_call_holds() -> None:
    assert cpu_peak_mib(_prepare, 256) == pytest.approx(256, rel=0.1)


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (None, 2000 * 2000),
        (lambda b, h, i, j: i >= j, 2000 * 2001 // 2),
        (lambda b, h, i, j: (i >= j) & (i - j < 64), 2000 * 64 - 64 * 63 // 2),
    ],
)
def test_visible_pairs_equal_the_closed_forms(mask: timing.Call | None, pairs: int) -> None:
    assert visible_pairs(mask, 2000, "cpu") == pairs  # 2000: more than one block of rows, the last one shorter


def test_reference_equals_autograd_through_the_materialised_matrix() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(2, 1500, 3, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    i, j = torch.arange(1500)[:, None], torch.arange(1500)[None, :]
    want = head_slice(
        q, k, v, do, mask=lambda b, h, i, j: i >= j, score=lambda s, b, h, i, j: s + 0.1 * h * (j - i), batch=1, head=2
    )
    one = [t[1, :, 2].clone().requires_grad_() for t in (q, k, v)]
    s = (one[0] @ one[1].T * 8**-0.5 + 0.2 * (j - i)).masked_fill(i < j, float("-inf"))
    o = s.softmax(-1) @ one[2]
    grads = torch.autograd.grad(o, one, do[1, :, 2])
    for got, expected in zip((want.o, want.dq, want.dk, want.dv), (o.detach(), *grads), strict=True):
        assert relative_error(got, expected) < 1e-12
    assert relative_error(want.dq + 1e-3, grads[0]) > 1e-4


def test_reference_sums_the_gradients_of_the_heads_that_share_one() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, 70, 4, 8), (1, 70, 2, 8), (1, 70, 2, 8), (1, 70, 4, 8))
    q, k, v, do = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    want = head_slice(q, k, v, do, mask=None, score=None, batch=0, head=3)
    alike = [t.clone().requires_grad_() for t in (q, k, v)]
    first = [t.repeat_interleave(4 // t.shape[2], 2).transpose(1, 2) for t in alike]
    o = torch.nn.functional.scaled_dot_product_attention(*first).transpose(1, 2)
    dq, dk, dv = torch.autograd.grad(o, alike, do)
    expected = (o.detach()[0, :, 3], dq[0, :, 3], dk[0, :, 1], dv[0, :, 1])
    for got, one in zip((want.o, want.dq, want.dk, want.dv), expected, strict=True):
        assert relative_error(got, one) < 1e-12
