"""Answers as they come, for programs of asyncio: one task computes the steps of all requests."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from tilewise.engine.params import SamplingParams
from tilewise.engine.request import RequestOutput

if TYPE_CHECKING:
    from tilewise.engine.engine import Engine


class Streams:
    """Streams of one engine, all of one event loop. Steps run in a thread, so that the loop goes on meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._alone = threading.Lock()  # the engine is of one thread at a time
        self._queues: dict[str, asyncio.Queue[RequestOutput | BaseException]] = {}
        self._task: asyncio.Task[None] | None = None

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None, priority: int
    ) -> AsyncIterator[RequestOutput]:
        """What each step gives for a prompt; who stops listening aborts it."""
        name = secrets.token_hex(8)
        self._queues[name] = asyncio.Queue()
        try:
            await asyncio.to_thread(self._add, prompt, params, name, priority)
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._serve())
            while True:
                found = await self._queues[name].get()
                if isinstance(found, BaseException):
                    raise found
                yield found
                if found.finished:
                    return
        finally:
            del self._queues[name]
            await asyncio.to_thread(self._abort, name)  # one that has ended is not known any more

    async def _serve(self) -> None:
        try:
            while self._engine.has_unfinished:
                for output in await asyncio.to_thread(self._step):
                    if output.request_id in self._queues:
                        self._queues[output.request_id].put_nowait(output)
        except Exception as error:
            for queue in self._queues.values():
                queue.put_nowait(error)

    def _add(self, prompt: str | Sequence[int], params: SamplingParams | None, name: str, priority: int) -> None:
        with self._alone:
            self._engine.add(prompt, params, request_id=name, priority=priority)

    def _abort(self, name: str) -> None:
        with self._alone:
            self._engine.abort(name)

    def _step(self) -> list[RequestOutput]:
        with self._alone:
            return self._engine.step()
