"""The engine ``transformers``: a model in this process, its requests decoded in a shared batch.

All work with the model happens in one thread, so that the event loop stays free. Requests join the
batch while others are being written, and leave it as soon as they are complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muster.base.device_faults import (
    give_memory_back,
    looks_like_out_of_memory,
    names_of,
)
from muster.base.errors import SetupError
from muster.pipeline.batch import BatchSize
from muster.pipeline.engines.answers import (
    Answer,
    Loaded,
    check,
    load,
    prepared,
    window,
)
from muster.pipeline.engines.engine import (
    Completion,
    EngineError,
    EngineSpec,
    Request,
    RequestError,
    Sampling,
    Watchdog,
)
from muster.pipeline.stages import METER

if TYPE_CHECKING:
    from muster.pipeline.engines.decoding import Decoder

_DEFAULT_BATCH = 32
#: Requests to have waiting per place in the batch, so that lengths that fit can be chosen.
_QUEUE_SHARE = 2
#: Reading the prompts of new rows delays the others by about as much as so many tokens.
_JOIN_COST = 3
#: Seconds in which other requests join the first one after an idle time.
_GATHER_S = 0.003
_STOP_S = 30.0
_STOP_BROKEN_S = 1.0


@dataclass(eq=False)
class _Job:
    request: Request
    future: asyncio.Future[Completion]
    answer: Answer | None = None


class TransformersEngine:
    """``batch_size`` of the spec is the most rows at once; 0 means 32."""

    def __init__(self, spec: EngineSpec) -> None:
        check(spec)
        self._spec = spec
        self._size = BatchSize(spec.batch_size or _DEFAULT_BATCH)
        self.concurrency = _QUEUE_SHARE * self._size.now
        self._watchdog = Watchdog(spec.timeout_s)
        self._inbox: list[_Job] = []
        self._news = threading.Condition()
        self._is_stopping = False
        self._broken: EngineError | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[_Job] = []  # of the thread alone, as all below
        self._running: dict[Answer, _Job] = {}
        self._idle_places = 0
        self._counts = dict.fromkeys(
            ("requests", "tokens", "prompt_tokens", "batches", "steps", "out_of_memory"), 0
        )

    async def start(self, device: str) -> None:
        """Load the model in the engine's thread."""
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._work, args=(device, started), name="muster-engine", daemon=True
        )
        self._thread.start()
        await started

    async def generate(self, request: Request) -> Completion:
        """A completion; RequestError for a prompt that is too long."""
        assert self._loop is not None, "start comes first"
        if self._broken is not None:
            raise self._broken
        job = _Job(request, self._loop.create_future())
        with self._news:
            self._inbox.append(job)
            self._news.notify()
        try:
            return await self._watchdog.wait(job.future)
        except EngineError as error:
            self._broken = error
            raise

    def stats(self) -> Mapping[str, Any]:
        """Counts since the start, and ``batch_size`` as it is now."""
        return {**self._counts, "batch_size": self._size.now}

    async def stop(self) -> None:
        """Stop; requests in flight fail, and a thread that hangs is left behind."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        left_s = _STOP_S if self._broken is None else _STOP_BROKEN_S
        self._broken = self._broken or EngineError("The engine was stopped.")
        with self._news:
            self._is_stopping = True
            self._news.notify()
        while thread.is_alive() and left_s > 0:
            await asyncio.sleep(0.005)
            left_s -= 0.005

    # ------------------------------------------------------------------ the thread

    def _work(self, device: str, started: asyncio.Future[None]) -> None:
        try:
            loaded, decoder = self._opened(device)
        except BaseException as error:
            self._post(_fail, started, error)
            return
        self._post(_answer, started, None)
        try:
            while self._take_in(loaded):
                self._turn(decoder)
        except BaseException as error:
            self._broken = EngineError(f"The model failed: {type(error).__name__}: {error}")
            self._broken.__cause__ = error
        gone = self._broken or EngineError("The engine was stopped.")
        for job in [*self._running.values(), *self._waiting, *self._inbox]:
            self._post(_fail, job.future, gone)
        self._running.clear()
        self._waiting.clear()

    def _opened(self, device: str) -> tuple[Loaded, Decoder]:
        from muster.pipeline.engines.decoding import Decoder, compiled

        loaded = load(self._spec, device)
        if not self._spec.compile:
            return loaded, Decoder(loaded.model)
        decoder = Decoder(loaded.model, compiled(loaded.model))
        _warm_up(decoder, loaded)
        return loaded, decoder

    def _take_in(self, loaded: Loaded) -> bool:
        """Move requests from the inbox to those that wait; False when it is time to stop."""
        with self._news:
            if not self._running and not self._waiting:
                self._news.wait_for(lambda: self._inbox or self._is_stopping)
                self._gather()
            new, self._inbox = self._inbox, []
            if self._is_stopping:
                self._waiting += new
                return False
        for job in new:
            try:
                job.answer = prepared(job.request, loaded)
                self._waiting.append(job)
            except RequestError as error:
                self._post(_fail, job.future, error)
        return True

    def _gather(self) -> None:
        seen = 0
        while seen < len(self._inbox) < self._size.now and not self._is_stopping:
            seen = len(self._inbox)
            self._news.wait(_GATHER_S)

    def _turn(self, decoder: Decoder) -> None:
        """Let requests join if it pays, or write one token of every answer."""
        self._forget(decoder)
        joining = self._joining(decoder)
        if not joining and not self._running:
            return
        num_rows, no_room = len(joining) or len(self._running), ""
        try:
            if joining:
                complete = decoder.admit([job.answer for job in joining if job.answer is not None])
            else:
                complete = decoder.step()
        except (RuntimeError, MemoryError) as error:
            if not looks_like_out_of_memory(names_of(error), str(error)):
                raise
            no_room = (str(error) or type(error).__name__).splitlines()[0]
        if no_room:  # after the handler: the error's frames hold the tensors of the batch
            self._shrink(decoder, no_room)
            return
        if joining:
            self._joined(joining)
        else:
            self._counts["steps"] += 1
        self._watchdog.progress()
        self._counts["tokens"] += num_rows
        METER.add("tokens", num_rows)
        self._deliver(complete)

    def _joining(self, decoder: Decoder) -> list[_Job]:
        """The waiting requests that join now; none until enough places have been idle."""
        free = self._size.now - len(self._running)
        if free <= 0 or not self._waiting:
            return []
        if self._running:
            self._idle_places += free
            if not decoder.takes_more or self._idle_places < _JOIN_COST * self._size.now:
                return []
        lengths = [0 if job.answer is None else job.answer.length for job in self._waiting]
        places = set(window(lengths, free))
        joining = [job for place, job in enumerate(self._waiting) if place in places]
        self._waiting = [job for place, job in enumerate(self._waiting) if place not in places]
        self._running |= {job.answer: job for job in joining if job.answer is not None}
        return joining

    def _joined(self, joining: Sequence[_Job]) -> None:
        self._idle_places = 0
        self._size.good()
        prompt_tokens = sum(len(job.answer.prompt) for job in joining if job.answer is not None)
        self._counts["batches"] += 1
        self._counts["prompt_tokens"] += prompt_tokens
        METER.add("prompt_tokens", prompt_tokens)

    def _shrink(self, decoder: Decoder, reason: str) -> None:
        """Put all rows in front of those that wait, for a batch of half as many rows."""
        rows = list(self._running.values())
        decoder.clear()
        for job in rows:
            if job.answer is not None:
                job.answer.restart()
        self._running.clear()
        give_memory_back()
        self._counts["out_of_memory"] += 1
        if len(rows) == 1:
            text = f"Out of memory with this prompt alone ({_tokens(rows[0])} tokens): {reason}"
            self._post(_fail, rows[0].future, RequestError(text))
            return
        self._size.shrink(len(rows))
        self._waiting = rows + self._waiting

    def _forget(self, decoder: Decoder) -> None:
        """Drop requests that were cancelled: nobody waits for them any more."""
        self._waiting = [job for job in self._waiting if not job.future.cancelled()]
        gone = [answer for answer, job in self._running.items() if job.future.cancelled()]
        for answer in gone:
            decoder.drop(answer)
            del self._running[answer]

    def _deliver(self, complete: Sequence[Answer]) -> None:
        for answer in complete:
            job = self._running.pop(answer)
            assert answer.finish_reason is not None
            completion = Completion(
                text=answer.text,
                finish_reason=answer.finish_reason,
                prompt_tokens=len(answer.prompt),
                completion_tokens=len(answer.tokens),
            )
            self._counts["requests"] += 1
            self._post(_answer, job.future, completion)

    def _post(self, call: Any, future: asyncio.Future[Any], value: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(call, future, value)


def _warm_up(decoder: Decoder, loaded: Loaded) -> None:
    """Compile at the start, where a failure is the machine's and not a request's."""
    request = Request(prompt="1 2 3", sampling=Sampling(max_tokens=4))
    try:
        decoder.admit([prepared(request, loaded) for _ in range(2)])
        while decoder.active:
            decoder.step()
    except Exception as error:
        reason = str(error).strip().splitlines()[:1]
        raise SetupError(
            f"The model cannot be compiled: {type(error).__name__}: {' '.join(reason)}",
            hint="leave --compile out; compiling needs a C++ compiler on a CPU, triton on a GPU.",
        ) from error


def _tokens(job: _Job) -> int:
    return 0 if job.answer is None else len(job.answer.prompt)


def _answer(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
