"""Ctrl-C, wherever it comes: an engine stays whole, and no request stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import tilewise
from tests.commands import RUNNER
from tests.engine import small
from tests.engine.disturbed import ASKED, SIZES, answers, ask, finish, undisturbed
from tests.engine.small import engine_of
from tests.engine.whole import check_empty, check_whole, samples_of
from tilewise.cli import generate as cli
from tilewise.cli.app import build
from tilewise.engine import LLM, Engine, RequestOutput, SamplingParams
from tilewise.engine.interrupts import Interrupts
from tilewise.engine.request import State

POINTS = 16
FOLDERS = tuple(str(Path(tilewise.__file__).parent / name) for name in ("engine", "kv"))


@pytest.fixture(autouse=True)
def python_handles_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class CtrlC:
    """Counts lines of the engine that are run while it is entered; a signal, Ctrl-C or another, comes before one."""

    def __init__(self, line: int = 0, number: int = signal.SIGINT) -> None:
        self.line, self.lines, self.came, self.number = line, 0, 0, number

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, kind: Any, *_: object) -> bool:
        sys.settrace(self._before)
        self.came += kind in (KeyboardInterrupt, SystemExit)
        return kind in (KeyboardInterrupt, SystemExit)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and not frame.f_code.co_filename.startswith(FOLDERS):
            return None
        self.lines += event == "line"
        if event == "line" and self.lines == self.line:
            signal.raise_signal(self.number)
        return self._trace


def some_of(lines: int) -> list[int]:
    """One number of each of equal parts, at different places of them."""
    part = lines / POINTS
    return [1 + int(part * (n + (n * 0.618) % 1)) for n in range(POINTS)]


def answered(engine: Engine, ctrl_c: CtrlC) -> dict[str, Any]:
    """All answers, of steps of which Ctrl-C interrupts one."""
    told: dict[str, RequestOutput] = {}

    def step() -> list[RequestOutput]:
        with ctrl_c:
            return engine.step()
        return []

    ask(engine)
    finish(engine, told, step)
    return answers(told)


@pytest.mark.parametrize("lag", [0, 1])
def test_ctrl_c_at_any_line_of_a_step(lag: int) -> None:
    undisturbed_one = CtrlC()
    answered(engine_of(**SIZES, lag=lag), undisturbed_one)
    for line in some_of(undisturbed_one.lines):
        ctrl_c = CtrlC(line)
        assert answered(engine_of(**SIZES, lag=lag), ctrl_c) == undisturbed(), line
        assert ctrl_c.came == 1, line


def test_another_signal_whose_handler_raises_at_any_line_of_a_step() -> None:
    undisturbed_one = CtrlC()
    answered(engine_of(**SIZES, lag=1), undisturbed_one)
    with handled(signal.SIGTERM, lambda *_: sys.exit(3)) as handler:
        for line in some_of(undisturbed_one.lines):
            ctrl_c = CtrlC(line, signal.SIGTERM)
            assert answered(engine_of(**SIZES, lag=1), ctrl_c) == undisturbed(), line
            assert ctrl_c.came == 1, line
        assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_handlers_are_back_after_a_signal_at_any_line_of_a_block(number: int) -> None:
    def block(ctrl_c: CtrlC) -> None:
        with ctrl_c, Interrupts() as interrupts, interrupts.let_through():
            pass

    with handled(signal.SIGTERM, lambda *_: sys.exit(3)) as handler:
        undisturbed_one = CtrlC()
        block(undisturbed_one)
        for line in range(1, undisturbed_one.lines + 1):
            ctrl_c = CtrlC(line, number)
            block(ctrl_c)
            assert ctrl_c.came == 1, line
            assert signal.getsignal(signal.SIGTERM) is handler, line
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, line


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return LLM(small.save(tmp_path / "model"), **SIZES, max_model_len=small.LENGTH, num_pages=16, prefix_cache=False)


def test_ctrl_c_at_any_line_of_generate(llm: LLM) -> None:
    prompts, params = zip(*ASKED.values(), strict=True)

    def generate(ctrl_c: CtrlC) -> list[Any]:
        with ctrl_c:
            return [[each.token_ids for each in output.outputs] for output in llm.generate(prompts, params)]
        return []

    undisturbed_one = CtrlC()
    generate(undisturbed_one)
    want = [[each[0] for each in undisturbed()[name][0]] for name in ASKED]
    for line in some_of(undisturbed_one.lines):
        ctrl_c = CtrlC(line)
        assert generate(ctrl_c) == []
        assert ctrl_c.came == 1, line
        check_empty(llm.engine)
    assert generate(CtrlC()) == want


STATES: dict[str, tuple[str, dict[str, Any]]] = {  # a request that is there after two steps, and sizes
    "waiting": ("sampled", {"max_running": 1}),
    "prefilling": ("greedy", {"max_batch_tokens": 5}),
    "decoding": ("greedy", {}),
}


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("state", STATES)
def test_ctrl_c_while_the_model_computes(state: str, lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, sizes = STATES[state]
    engine, told = engine_of(page_size=4, num_pages=64, lag=lag, **sizes), {}
    ask(engine)
    for _ in range(2):
        told |= {output.request_id: output for output in engine.step()}
    sample = next(sample for sample in samples_of(engine) if sample.request.request_id == name)
    where = (sample.state is State.WAITING, sample.computed < sample.prompt_length)
    assert where == {"waiting": (True, True), "prefilling": (False, True), "decoding": (False, False)}[state]
    interrupt_computing(engine, monkeypatch, at=1)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    check_whole(engine)
    finish(engine, told, engine.step)
    assert answers(told) == undisturbed()


def test_a_second_ctrl_c_waits_until_the_engine_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told = engine_of(**SIZES), {}
    ask(engine)
    engine.step()
    interrupt_computing(engine, monkeypatch, at=1)
    restart = engine.scheduler.restart

    def interrupted(*args: Any, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        restart(*args, **kwargs)

    monkeypatch.setattr(engine.scheduler, "restart", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    check_whole(engine)
    finish(engine, told, engine.step)
    assert answers(told) == undisturbed()


def test_ctrl_c_while_asyncio_streams_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(**SIZES)
    interrupt_computing(engine, monkeypatch, at=2)

    async def run() -> None:
        async for _ in engine.stream([1, 2, 3], SamplingParams(max_tokens=30)):
            pass

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    engine.step()
    check_empty(engine)


def test_ctrl_c_in_a_chat_stops_the_answer_not_the_program(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.tokenizer._templates["default"] = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    asked = iter(["the", "you", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(asked))
    monkeypatch.setattr(cli, "_llm", lambda *_: (llm, SamplingParams))
    interrupt_computing(llm.engine, monkeypatch, at=4)
    done = RUNNER.invoke(build(rich=False), ["chat", "model", "--max-tokens", "8", "--temperature", "0"])
    assert done.exit_code == 0, done.output
    assert [line.split(",")[0] for line in done.output.splitlines() if "tokens/s" in line] == ["[3 tokens", "[8 tokens"]
    check_empty(llm.engine)


def test_an_answer_that_fails_is_an_error_of_the_command(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = llm.engine.decoder.logits
    monkeypatch.setattr(llm.engine.decoder, "logits", lambda hidden: logits(hidden) * float("nan"))
    monkeypatch.setattr(cli, "_llm", lambda *_: (llm, SamplingParams))
    done = RUNNER.invoke(build(rich=False), ["generate", "model", "the"])
    assert done.exit_code == 1
    assert "logits are no numbers" in done.stderr


# Interrupts


def test_the_handler_of_the_program_is_called_when_a_block_ends() -> None:
    came: list[str] = []
    signal.signal(signal.SIGINT, lambda *_: came.append("program"))
    with Interrupts() as outer:
        with Interrupts() as inner:
            signal.raise_signal(signal.SIGINT)
            came.append("inner")
            with inner.let_through():  # what holds is the outer block
                came.append("through")
        came.append("outer")
        with outer.let_through():
            came.append("computing")
    came.append("after")
    assert came == ["inner", "through", "outer", "program", "computing", "after"]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_all_handlers_whose_signals_came_are_called_although_one_raises() -> None:
    came: list[str] = []
    with handled(signal.SIGTERM, lambda *_: came.append("term")), handled(signal.SIGUSR1, lambda *_: sys.exit(3)):

        def interrupted() -> None:
            with Interrupts():
                signal.raise_signal(signal.SIGUSR1)
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)
                came.append("inside")

        with pytest.raises(SystemExit):
            interrupted()
        assert came == ["inside", "term"]


def test_a_handler_that_returns_does_not_shut_the_way_for_the_next() -> None:
    came: list[str] = []
    with handled(signal.SIGUSR1, lambda *_: came.append("usr1")), Interrupts() as interrupts:
        signal.raise_signal(signal.SIGUSR1)
        came.append("before")
        with interrupts.let_through():
            signal.raise_signal(signal.SIGUSR1)
            came.append("inside")
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)
        came.append("after")
    assert came == ["before", "usr1", "usr1", "inside", "after", "usr1"]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_python_does_not_handle_ctrl_c_nothing_changes(handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_set_no_handlers() -> None:
    found = []

    def work() -> None:
        with Interrupts() as interrupts, interrupts.let_through():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


@contextlib.contextmanager
def handled(number: int, handler: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A program's handler of a signal."""
    before = signal.signal(number, handler)
    try:
        yield handler
    finally:
        signal.signal(number, before)


def interrupt_computing(engine: Engine, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Ctrl-C while the model computes its next step of this number."""
    hidden, count = engine.decoder.hidden, [0]

    def interrupted(*args: Any) -> Any:
        count[0] += 1
        if count[0] == at:
            signal.raise_signal(signal.SIGINT)
        return hidden(*args)

    monkeypatch.setattr(engine.decoder, "hidden", interrupted)
