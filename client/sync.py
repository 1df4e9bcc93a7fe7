"""`Client`: the same as `AsyncClient`, for programs without an event loop.

Owns one thread that runs an event loop, and the way in and out of it. Everything else is `aio.py`.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from pagedd.client.aio import LOAD_WAIT_S, AsyncClient
from pagedd.client.aio import Generation as AsyncGeneration
from pagedd.client.options import SamplingOptions
from pagedd.client.protocol import ChatMessage, Delta, Done, Pong
from pagedd.client.questions import BlockDetail, Evicted, Prefixes, RequestText, UsageReport
from pagedd.client.stats_frame import StatsFrame

_Result = TypeVar("_Result")


class Client:
    """A connection to the daemon of this machine. May be used from several threads at once.

        with Client() as client:
            for delta in client.generate("Once upon a time", max_tokens=64):
                print(delta.text, end="", flush=True)
            done = client.chat([{"role": "user", "content": "Hello!"}]).result()

    Every refusal is a `PageddError` with the daemon's code. The arguments are those of `AsyncClient`; `on_load_wait` is
    called in this client's own thread.
    """

    def __init__(
        self,
        runtime_dir: str | Path | None = None,
        *,
        timeout_s: float = 10.0,
        load_wait_s: float = LOAD_WAIT_S,
        on_load_wait: Callable[[], None] | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = AsyncClient(runtime_dir, timeout_s=timeout_s, load_wait_s=load_wait_s, on_load_wait=on_load_wait)
        # A daemon thread, so that a program that forgets `close` still ends.
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagedd client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        try:
            self._wait(self._client.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends this client's live requests, its sockets and its thread. Calling it again does nothing."""
        if self._loop.is_closed():
            return
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        model: str = "default",
        priority: int = 0,
        parse_special: bool = False,
        cache_salt: str | None = None,
        trace_context: Mapping[str, str] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> "Generation":
        """Continue `prompt`, or `prompt_token_ids`. Nothing is sent until the `Generation` is iterated or asked."""
        generation = self._client.generate(
            prompt,
            prompt_token_ids=prompt_token_ids,
            model=model,
            priority=priority,
            parse_special=parse_special,
            cache_salt=cache_salt,
            trace_context=trace_context,
            **sampling,
        )
        return Generation(self, generation)

    def chat(
        self,
        messages: Iterable[ChatMessage | Mapping[str, str]],
        *,
        model: str = "default",
        priority: int = 0,
        cache_salt: str | None = None,
        trace_context: Mapping[str, str] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> "Generation":
        """Answer a conversation, given as `ChatMessage` or as dicts with `role` and `content`."""
        generation = self._client.chat(
            messages,
            model=model,
            priority=priority,
            cache_salt=cache_salt,
            trace_context=trace_context,
            **sampling,
        )
        return Generation(self, generation)

    def stats(self, *, blocks: bool = False) -> StatsFrame:
        """One picture of the daemon; `blocks` adds the block map and every block table."""
        return self._wait(self._client.stats(blocks=blocks))

    def watch_stats(self) -> Iterator[StatsFrame]:
        """Pictures as the daemon publishes them. A slow reader misses some and always gets the newest."""
        frames = self._client.watch_stats()
        # Ctrl-C may leave `newest` on its way out when `close` comes, and a generator has room for one.
        turn = asyncio.Lock()
        asking: asyncio.Task[Any] | None = None

        async def newest() -> StatsFrame:
            nonlocal asking
            asking = asyncio.current_task()
            async with turn:
                return await anext(frames)

        async def close() -> None:
            # Or it came before anybody waited for `newest`, and nobody has cancelled it.
            if asking is not None and not asking.cancelling():
                asking.cancel()
            async with turn:
                await frames.aclose()

        try:
            while True:
                yield self._wait(newest())
        finally:
            self._wait(close())

    def block(self, index: int) -> BlockDetail:
        """What block `index` (physical) holds and who uses it; text and token ids for those who may see them."""
        return self._wait(self._client.block(index))

    def prefixes(self, limit: int = 1000) -> Prefixes:
        """The tree of cached prefixes, most recently used first."""
        return self._wait(self._client.prefixes(limit))

    def text(self, request_id: str) -> RequestText:
        """Prompt and output so far of a live request."""
        return self._wait(self._client.text(request_id))

    def previews(self) -> dict[str, str]:
        """The first words of each live request whose text this user may see, by its daemon-given `request_id`."""
        return self._wait(self._client.previews())

    def usage(self) -> UsageReport:
        """Who has used how much, and what a token costs."""
        return self._wait(self._client.usage())

    def evict_prefix(self, digest: str) -> Evicted:
        """Frees a node of `prefixes` and all that continues it, but for blocks in use, through the admin socket."""
        return self._wait(self._client.evict_prefix(digest))

    def ping(self) -> Pong:
        """The daemon's version and state."""
        return self._wait(self._client.ping())

    def cancel(self, request: "Generation | str") -> None:
        """End a request: one of this client's own, or any other by its `request_id` through the admin socket."""
        self._wait(self._client.cancel(request if isinstance(request, str) else request._generation))

    def set_priority(self, request_id: str, priority: int) -> None:
        """Change a live request's priority through the admin socket."""
        self._wait(self._client.set_priority(request_id, priority))

    def load(self, model: str, served_name: str | None = None) -> None:
        """See `AsyncClient.load`."""
        self._wait(self._client.load(model, served_name))

    def sleep(self) -> None:
        """Give the device back; the next request wakes the engine. Through the admin socket."""
        self._wait(self._client.sleep())

    def wake(self) -> None:
        """Have the engine load now instead of at the next request. Through the admin socket."""
        self._wait(self._client.wake())

    def _start(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("this client is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        future = self._start(work)
        try:
            return future.result()
        finally:
            # Ctrl-C lands here with the work undone: it must not go on behind the caller's back.
            future.cancel()


class Generation:
    """One request: iterate for its `Delta`s as they come, or ask for the whole `result()`. See `aio.Generation`."""

    def __init__(self, client: Client, generation: AsyncGeneration) -> None:
        self._client = client
        self._generation = generation

    @property
    def id(self) -> str:
        """This client's name for the request."""
        return self._generation.id

    @property
    def request_id(self) -> str | None:
        """The daemon's name for it; None until the daemon has accepted."""
        return self._generation.request_id

    def __iter__(self) -> Iterator[Delta]:
        # Handed over through a queue rather than fetched one by one: no trip to the loop for each token.
        arrived: SimpleQueue[Delta | None] = SimpleQueue()

        async def pump() -> None:
            try:
                async for delta in self._generation:
                    arrived.put(delta)
            finally:
                arrived.put(None)

        pumping = self._client._start(pump())
        try:
            while (delta := arrived.get()) is not None:
                yield delta
            pumping.result()
        finally:
            pumping.cancel()

    def result(self) -> Done:
        """The whole answer. Raises `PageddError` when the request was refused or broke."""
        return self._client._wait(self._generation.result())

    def cancel(self) -> None:
        """End the request; whoever reads it gets what there is, with `finish_reason` `abort`."""
        self._client.cancel(self)
