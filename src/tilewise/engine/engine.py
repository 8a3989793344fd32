"""The engine: requests come in at any time, each step computes what fits, and every answer is its request's alone."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tilewise.core.errors import InputError, shown
from tilewise.engine.config import EngineConfig
from tilewise.engine.decoding.draft import load_draft, make_draft
from tilewise.engine.decoding.speculators import Speculators
from tilewise.engine.groups import groups_of
from tilewise.engine.interrupts import Interrupts
from tilewise.engine.memory import make_pool
from tilewise.engine.models.decoder import Decoder
from tilewise.engine.pages import Pages
from tilewise.engine.params import SamplingParams
from tilewise.engine.request import Request, RequestOutput, Sample, State, seed_of
from tilewise.engine.runner import Given, Runner, Step
from tilewise.engine.scheduler import Scheduler, Work
from tilewise.engine.streams import Streams
from tilewise.engine.text import Text


class Engine:
    """Continuous batching over one model.

    A step plans on the host, runs on the device, and takes what an earlier step gave: on a GPU the host is one step
    behind, so that the device never waits for it.

    Args:
        decoder: the model, with its weights.
        tokenizer: turns text into tokens and back; None for an engine of tokens alone.
        config: sizes and choices.

    Raises:
        InputError: the pages hold less than one sequence of `max_model_len`.

    Source: Yu et al., "Orca", 2022; Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023; Zheng et al., "SGLang", 2023 (shared prefixes).

    Example:
        >>> from tilewise.engine import Engine, EngineConfig, SamplingParams
        >>> from tilewise.engine.models.load import decoder_of
        >>> decoder = decoder_of("random:tiny", device="cpu")
        >>> engine = Engine(decoder, config=EngineConfig(max_model_len=64, num_pages=8))
        >>> name = engine.add([5, 6, 7], SamplingParams(max_tokens=2))
        >>> outputs = [engine.step()[0], engine.step()[0]]  # a token each
        >>> [(len(output.outputs[0].token_ids), output.finished) for output in outputs]
        [(1, False), (2, True)]
    """

    def __init__(self, decoder: Decoder, tokenizer: Any = None, config: EngineConfig | None = None) -> None:
        self.config = EngineConfig() if config is None else config
        self.decoder, self.tokenizer, model = decoder, tokenizer, decoder.config
        self.max_model_len = self.config.max_model_len or model.max_length
        groups = groups_of(model.windows)
        draft = load_draft(self.config.speculation, decoder)
        pool = make_pool(decoder, groups, self.config, self.max_model_len, draft)
        # with graphs, a row more than there are samples, for those that pad a step
        slots, share = self.config.max_running + self.config.graphs_on(decoder.device), self.config.prefix_cache
        self.pages = Pages(pool, groups, slots, self.max_model_len, share=share)
        self.runner = Runner(decoder, self.pages, self.config, self.max_model_len)
        chains = decoder.invariant or any(group.window is not None for group in groups)  # branches have other kernels
        self.speculators = Speculators(self.config.speculation, chains=chains)
        if draft is not None:
            self.speculators.draft = make_draft(draft, self.runner, self.config, self.max_model_len)
        self.scheduler = Scheduler(self.config, self.pages, self._drain, self.speculators)
        self._lag = self.config.lag_on(decoder.device)
        self._under_way: deque[Step] = deque()
        self._raised = False  # the last step: the next one is taken before it returns, so that something comes of it
        self._began: float | None = None  # when a step was launched with none under way
        self._lost = False  # whether a step that was launched failed on the device
        self._requests: dict[str, Request] = {}
        self._changed: dict[Request, None] = {}
        self._ends = frozenset(model.eos_token_ids)
        self._streams = Streams(self)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request goes on, or has an end that no step has told yet."""
        return bool(self._requests or self._changed)

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Take a request; steps answer it.

        Args:
            prompt: text, or its tokens.
            params: how tokens are chosen, and when the answer ends.
            request_id: a name that no live request has; None makes one.
            priority: lower ones go first, and equal ones in the order in which they came. Where pages run out, the last
                in this order loses its own, waits in its old place, and computes them anew.

        Returns:
            The request's id.

        Raises:
            InputError: an empty prompt, one as long as the context, tokens outside the vocabulary, an id that lives,
                too many that wait, or an argument of another type.
        """
        params = SamplingParams() if params is None else params
        _check_types(params, request_id, priority)
        tokens, text = self._prompt(prompt)
        room = self.max_model_len - len(tokens)
        if room < 1:
            hint = "shorten it, or give the engine a larger max_model_len"
            expected = f"fewer than max_model_len, {self.max_model_len}, tokens"
            raise InputError("prompt", got=f"{len(tokens)} tokens", expected=expected, hint=hint)
        params.check_vocabulary(self.decoder.config.vocab_size)
        self.speculators.check(params)
        name = secrets.token_hex(8) if request_id is None else request_id
        if name in self._requests:
            raise InputError(
                "request_id", got=shown(name), expected="one that no live request has", hint="None makes one"
            )
        if self.scheduler.num_waiting + params.n > self.config.max_waiting:
            expected = f"at most {self.config.max_waiting}"
            raise InputError("requests that wait", got="one more", expected=expected, hint="add it later")
        most = len(tokens) + (room if params.max_tokens is None else min(room, params.max_tokens))
        request = Request(name, text, tokens, params, most, priority)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        for index in range(params.n):
            sample = Sample(request, index, seed_of(seed, index), list(tokens))
            sample.text = self._text(request)
            request.samples.append(sample)
        with Interrupts():
            self._requests[name] = request
            for sample in request.samples:
                self.scheduler.add(sample)
        return name

    def abort(self, request_id: str) -> None:
        """End a request. What it has is given back at once, and the next step tells of it.

        Args:
            request_id: as `add` returned it; an id that no live request has does nothing.

        Raises:
            InputError: the id is no text.
        """
        if not isinstance(request_id, str):
            raise InputError("request_id", got=shown(request_id), expected="text", hint="one id, as `add` returned it")
        request = self._requests.get(request_id)
        with Interrupts():
            for sample in [] if request is None else request.samples:
                self._end(sample, "abort")

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Answer a prompt in a program of asyncio: `async for output in engine.stream(prompt)`.

        Steps run in a thread, shared by all streams of one event loop. Leaving the loop early aborts the request. While
        streams are open, call no other method of the engine.

        Args:
            prompt: text, or its tokens.
            params: how tokens are chosen, and when the answer ends.
            priority: lower ones go first.

        Returns:
            What each step gives for this prompt; the last one is `finished`.

        Raises:
            InputError: as `add` does, at the first output.
        """
        return self._streams.stream(prompt, params, priority)

    def step(self) -> list[RequestOutput]:
        """Compute one step.

        Returns:
            The requests that have something new, as they are now. Empty where nothing is left to do.

        Raises:
            BaseException: what the device raises, or Ctrl-C.

        An exception, of the device or by Ctrl-C, leaves the engine whole: that step does not count, and requests go on
        with the tokens that they have, and with keys and values of steps before. Where the device fails in a step that
        it had begun, all keys and values are computed anew.
        """
        changed: list[Request] = []
        try:
            changed = self.advance()
            return [request.output() for request in changed]
        except BaseException:  # Ctrl-C before the outputs are there: the next step gives them
            self._changed = dict.fromkeys(changed) | self._changed
            raise

    def advance(self) -> list[Request]:
        """`step`, for callers that look at requests themselves.

        Returns:
            The requests that have something new.

        Raises:
            BaseException: as `step` does.
        """
        with Interrupts() as interrupts:
            try:
                if proposing := any(map(self.speculators.wants, self.scheduler.running)):
                    self._drain()  # proposals go on from tokens that are known
                work = self.scheduler.plan()
                if work:
                    self._launch(work, interrupts)
                lag = 0 if self._raised or proposing else self._lag
                while self._under_way and (len(self._under_way) > lag or not work):
                    self._take_next()
                self._raised = False
            except BaseException:
                self._recover()
                raise
        for request in self._changed:
            if request.finished and self._requests.get(request.request_id) is request:
                del self._requests[request.request_id]
        try:
            return list(self._changed)
        finally:
            self._changed = {}  # nothing follows: where Ctrl-C comes before, the next step tells of these

    def _recover(self) -> None:
        """After an exception: what was planned and not launched does not count."""
        self._raised = True
        with contextlib.suppress(Exception):  # of a device that gives nothing any more
            self._drain()
        self.speculators.recover()
        samples = [sample for request in self._requests.values() for sample in request.samples]
        self.scheduler.restart(samples, keep=not self._lost)
        if self._lost:  # and nobody finds pages of steps that failed
            self.pages.forget()
        self._lost = False

    def _launch(self, work: list[Work], interrupts: Interrupts) -> None:
        seated = [each for each in work if each.sample.seated != each.turn]
        if seated:
            self.runner.seat([each.sample for each in seated])
            for each in seated:
                each.sample.seated = each.turn
        self._began = None if self._under_way else time.perf_counter()
        with interrupts.let_through():
            step = self.runner.launch(work, self.pages.grown())
        self._under_way.append(step)
        self.pages.launched()
        for each in work:
            each.sample.written = each.start + (each.count if each.tree is None else 1)
        for each in work:
            if each.tree is None:
                self._wrote(each, each.start + each.count)

    def _wrote(self, each: Work, end: int) -> None:
        """Note that keys and values are there up to position `end`: later launches find them."""
        if each.start // self.pages.page_size < end // self.pages.page_size:
            self._remember(each.sample, end)
            self.pages.drop_unseen(each.slot, min(end, len(each.sample.tokens) - 1))

    def _remember(self, sample: Sample, length: int) -> None:
        if sample.sequence is not None and sample.request.params.prompt_logprobs is None:
            self.pages.remember(sample.sequence, sample.tokens[:length])

    def _drain(self) -> None:
        """Take what all steps under way give."""
        while self._under_way:
            self._take_next()

    def _take_next(self) -> None:
        """Take what the first step under way gives. Where that raises, later steps do not count: they go on from it."""
        step = self._under_way.popleft()
        try:
            self._lost = True  # where this raises
            step.wait()
            self._lost = False
            if self._began is not None and not self._under_way:
                self.speculators.record(sum(each.count for each in step.work), time.perf_counter() - self._began)
            self._take(step)
        except BaseException:
            self._under_way.clear()
            raise

    def _take(self, step: Step) -> None:
        """Give samples what a step gave."""
        for each, prompted in ((step.work[n], prompted) for n, prompted in step.prompted.items()):
            if each.turn == each.sample.turn:
                found = each.sample.request.prompt_logprobs
                found += prompted.listed()[len(found) - each.start :]  # one that was preempted has some
        sampled = [each for each in step.work if each.samples]
        if not sampled or step.given is None:
            return
        tokens, row = step.given.tokens.tolist(), 0
        paths = iter([] if step.given.nodes is None else step.given.nodes.tolist())
        for each in sampled:
            count = 1 if each.tree is None else len(each.tree.tokens)
            path = [0] if each.tree is None else [node for node in next(paths) if node >= 0]
            if each.turn == each.sample.turn:  # else it has ended, or begins anew
                known = len(each.sample.tokens)
                if each.tree is not None:
                    self.scheduler.settle(each, len(path) - 1)
                try:
                    came = [*(each.tree.tokens[node] for node in path[1:] if each.tree), tokens[row + path[-1]]]
                    for node, token in zip(path, came, strict=True):
                        if each.sample.state is not State.FINISHED:  # by the token before
                            self._give(each.sample, token, step.given, row + node)
                except BaseException:
                    self._take_back(each.sample, known)
                    raise
                if each.tree is not None:
                    self.speculators.took(each.sample, each.tree, path[1:], tokens[row : row + count])
                    if each.sample.state is not State.FINISHED:
                        self._wrote(each, each.sample.written)
            row += count

    def _give(self, sample: Sample, token: int, given: Given, row: int) -> None:
        """Add a token to an answer, which it may end."""
        params = sample.request.params
        self._changed[sample.request] = None
        if token < 0:
            sample.error = "the model's logits are no numbers, or no token may come"
            return self._end(sample, "error")
        sample.tokens.append(token)
        if params.logprobs is not None:
            sample.logprobs.append(given.logprob(row, token, params.logprobs))
        may_stop = len(sample.tokens) - sample.prompt_length >= params.min_tokens
        if may_stop and (token in params.stop_token_ids or (token in self._ends and not params.ignore_eos)):
            if params.include_stop:
                sample.text.push(token, may_stop=False)
            return self._end(sample, "stop", token if token in params.stop_token_ids else None)
        stopped = sample.text.push(token, may_stop=may_stop)
        if stopped is not None:
            return self._end(sample, "stop", stopped)
        if len(sample.tokens) >= sample.most:
            return self._end(sample, "length")
        return None

    def _end(self, sample: Sample, reason: str, why: str | int | None = None) -> None:
        if sample.state is State.FINISHED:
            return
        sample.finish_reason, sample.stop_reason = reason, why
        sample.text.end()
        if reason in ("stop", "length"):  # a later prompt may go on from here
            self._remember(sample, sample.written)
        self.scheduler.end(sample)
        self.speculators.end(sample)
        self._changed[sample.request] = None

    def _take_back(self, sample: Sample, known: int) -> None:
        """Leave a sample the first `known` of its tokens, unless it has ended: the next one comes again."""
        if sample.state is State.FINISHED:
            return
        del sample.tokens[known:], sample.logprobs[known - sample.prompt_length :]
        sample.finish_reason = sample.stop_reason = sample.error = None
        sample.text = self._text(sample.request)
        for count, token in enumerate(sample.output_tokens, 1):
            sample.text.push(token, may_stop=count >= sample.request.params.min_tokens)

    def _text(self, request: Request) -> Text:
        return Text(self.tokenizer, request.params, request.tokens if request.prompt is None else request.prompt)

    def _prompt(self, prompt: Any) -> tuple[list[int], str | None]:
        """(tokens, text)."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError("prompt", got="text", expected="tokens", hint="this engine has no tokenizer")
            tokens, text = self.tokenizer.encode(prompt), prompt
        else:
            listed = isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray))
            wrong = next((token for token in prompt if type(token) is not int), None) if listed else None
            if not listed or wrong is not None:
                got = type(prompt).__name__ + (f" with {shown(wrong)}" if listed else "")
                hint = "a tensor's are .tolist()"
                raise InputError("prompt", got=got, expected="text or a list of tokens, integers", hint=hint)
            tokens, text = list(prompt), None
        if not tokens:
            raise InputError("prompt", got="no token", expected="at least one", hint="begin with a first token")
        size = self.decoder.config.vocab_size
        outside = [token for token in tokens if not 0 <= token < size]
        if outside:
            raise InputError(
                "prompt", got=f"token {outside[0]}", expected=f"0 to {size - 1}", hint="another tokenizer?"
            )
        return tokens, text


def _check_types(params: object, request_id: object, priority: object) -> None:
    if not isinstance(params, SamplingParams):
        hint = "SamplingParams(max_tokens=32)"
        raise InputError("params", got=shown(params), expected="SamplingParams", hint=hint)
    if request_id is not None and not isinstance(request_id, str):
        raise InputError("request_id", got=shown(request_id), expected="text, or None", hint="None makes one")
    if type(priority) is not int:
        raise InputError("priority", got=shown(priority), expected="an integer", hint="lower ones go first")
