"""`AsyncClient`: talk to the daemon from asyncio.

Owns what is asked, over which connection (`connections.py`), and the life of a generation. Knows no socket (`link.py`),
no place (`endpoints.py`) and no message's meaning beyond which ends a request (`protocol.py`). The blocking `Client` is
in `sync.py`.
"""

import itertools
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import msgspec
import zmq

from pagedd.client.connection import as_error, decoded
from pagedd.client.connections import Connections
from pagedd.client.errors import PageddError
from pagedd.client.load_wait import LoadWait
from pagedd.client.options import SamplingOptions, make_sampling
from pagedd.client.protocol import (
    Accepted,
    Cancel,
    Chat,
    ChatMessage,
    Delta,
    Done,
    Failed,
    Generate,
    Load,
    Ok,
    Ping,
    Pong,
    SetPriority,
    Sleep,
    Wake,
    Waking,
)
from pagedd.client.questions import (
    BlockDetail,
    Evicted,
    EvictPrefix,
    GetBlock,
    GetPrefixes,
    GetPreviews,
    GetStats,
    GetText,
    GetUsage,
    Prefixes,
    Previews,
    RequestText,
    Stats,
    UsageReport,
)
from pagedd.client.stats_frame import StatsFrame, decode_stats

# A load takes seconds on a CPU, and minutes where kernels are compiled or graphs captured.
LOAD_WAIT_S = 300.0

_PICTURES_BEHIND = 64


class AsyncClient:
    """A connection to the daemon of this machine, opened at the first use and again after the daemon was away.

        async with AsyncClient() as client:
            async for delta in client.generate("Once upon a time", max_tokens=64):
                print(delta.text, end="", flush=True)
            done = await client.chat([{"role": "user", "content": "Hello!"}])

    Belongs to one event loop. Every refusal is a `PageddError` with the daemon's code.

    Args:
        runtime_dir: the folder of the daemon's sockets; None looks in the usual places (`endpoints.client_endpoints`).
        timeout_s: most seconds to wait for a connection or for an answer that costs the daemon nothing (stats, ping,
            cancel). A generation may take as long as it takes: bound it with `asyncio.timeout`, which cancels it.
        load_wait_s: most seconds that a generation waits while the daemon is loading its model or waking its engine;
            then, and with 0 at once, it is refused with `engine_loading`.
        on_load_wait: called when such a wait begins, for whoever wants to tell people.
    """

    def __init__(
        self,
        runtime_dir: str | Path | None = None,
        *,
        timeout_s: float = 10.0,
        load_wait_s: float = LOAD_WAIT_S,
        on_load_wait: Callable[[], None] | None = None,
    ) -> None:
        self._daemon = Connections(runtime_dir, timeout_s)
        self._load_wait_s = load_wait_s
        self._on_load_wait = on_load_wait
        self._ids = map(str, itertools.count(1))
        self._generations: dict[str, Generation] = {}

    async def __aenter__(self) -> Self:
        await self._daemon.requests()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends this client's live requests and closes its sockets. The client can be used again."""
        await self._daemon.close()

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
        """Continue `prompt`, or `prompt_token_ids`. Nothing is sent until the `Generation` is iterated or awaited.

        `trace_context` is what OpenTelemetry's `inject` writes: the daemon's span becomes a child of the current one.
        """
        options, context = make_sampling(**sampling), trace_context or {}

        def request(id: str, stream: bool) -> Generate:
            return Generate(
                id=id,
                prompt=prompt,
                prompt_token_ids=None if prompt_token_ids is None else list(prompt_token_ids),
                sampling=options,
                model=model,
                priority=priority,
                stream=stream,
                parse_special=parse_special,
                cache_salt=cache_salt,
                traceparent=context.get("traceparent"),
                tracestate=context.get("tracestate"),
            )

        return Generation(self, next(self._ids), request)

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
        """Answer a conversation, given as `ChatMessage` or as dicts with `role` and `content`.

        Raises `PageddError("invalid_type")` when a message is not of that form.
        """
        options, context = make_sampling(**sampling), trace_context or {}
        conversation = _conversation(messages)

        def request(id: str, stream: bool) -> Chat:
            return Chat(
                id=id,
                messages=conversation,
                sampling=options,
                model=model,
                priority=priority,
                stream=stream,
                cache_salt=cache_salt,
                traceparent=context.get("traceparent"),
                tracestate=context.get("tracestate"),
            )

        return Generation(self, next(self._ids), request)

    async def stats(self, *, blocks: bool = False) -> StatsFrame:
        """One picture of the daemon; `blocks` adds the block map and every block table."""
        return (await self._daemon.ask(GetStats(id=next(self._ids), blocks=blocks), Stats)).frame

    async def watch_stats(self, *, every: bool = False) -> AsyncGenerator[StatsFrame, None]:
        """Pictures as the daemon publishes them. A slow reader misses some and always gets the newest.

        With `every` it gets all of them, as long as it is not more than a quarter of a minute behind.
        Raises `PageddError("daemon_unreachable")` when the daemon goes.
        """
        # CONFLATE keeps one message, so a reader that sleeps never sees an old one.
        kept = (zmq.RCVHWM, _PICTURES_BEHIND) if every else (zmq.CONFLATE, 1)
        options: dict[int, int | bytes] = {kept[0]: kept[1], zmq.SUBSCRIBE: b""}
        link = await self._daemon.watch(options)
        try:
            while True:
                for frames in (await link.receive())[0 if every else -1 :]:
                    yield decoded(decode_stats, frames[0])
        finally:
            link.close()

    async def block(self, index: int) -> BlockDetail:
        """What block `index` (physical) holds and who uses it; text and token ids for those who may see them.

        Raises `PageddError`: `invalid_value` beyond the pool, or one that says why there is no engine to ask.
        """
        return await self._daemon.ask(GetBlock(id=next(self._ids), index=index), BlockDetail)

    async def prefixes(self, limit: int = 1000) -> Prefixes:
        """The tree of cached prefixes, most recently used first. Raises `PageddError` like `block`."""
        return await self._daemon.ask(GetPrefixes(id=next(self._ids), limit=limit), Prefixes)

    async def text(self, request_id: str) -> RequestText:
        """Prompt and output so far of a live request.

        Raises `PageddError`: `request_not_found`, or `forbidden` for another user's.
        """
        return await self._daemon.ask(GetText(id=next(self._ids), target=request_id), RequestText)

    async def previews(self) -> dict[str, str]:
        """The first words of each live request whose text this user may see, by its daemon-given `request_id`."""
        return (await self._daemon.ask(GetPreviews(id=next(self._ids)), Previews)).previews

    async def usage(self) -> UsageReport:
        """Who has used how much, and what a token costs."""
        return await self._daemon.ask(GetUsage(id=next(self._ids)), UsageReport)

    async def evict_prefix(self, digest: str) -> Evicted:
        """Frees a node of `prefixes` and all that continues it, but for blocks in use, through the admin socket.

        Raises `PageddError`: `prefix_not_found`, `invalid_value` or `forbidden`.
        """
        return await self._daemon.order(EvictPrefix(id=next(self._ids), digest=digest), Evicted)

    async def ping(self) -> Pong:
        """The daemon's version and state (`loading`, `ready`, …)."""
        return await self._daemon.ask(Ping(id=next(self._ids)), Pong)

    async def cancel(self, request: "Generation | str") -> None:
        """End a request: one of this client's own, or any other by its `request_id` through the admin socket.

        Raises `PageddError`: `request_not_found`, or `forbidden` when this user may not act on others' requests.
        """
        target = request if isinstance(request, str) else request.id
        for own in self._generations.values():
            if target in (own.id, own.request_id):
                if own._load_wait.is_waiting:
                    own._load_wait.give_up()
                    return
                await self._daemon.ask(Cancel(id=next(self._ids), target=own.id), Ok)
                return
        if not isinstance(request, str):
            raise PageddError("request_not_found", f"request {request.id} is not running")
        await self._daemon.order(Cancel(id=next(self._ids), target=target), Ok)

    async def set_priority(self, request_id: str, priority: int) -> None:
        """Change a live request's priority (-100 … 100, higher is more urgent) through the admin socket.

        Raises `PageddError`: `request_not_found`, `invalid_value` or `forbidden`.
        """
        message = SetPriority(id=next(self._ids), target=request_id, priority=priority)
        await self._daemon.order(message, Ok)

    async def sleep(self) -> None:
        """Give the device back: the engine's process ends when its requests have, and the next request wakes it.

        Through the admin socket. Raises `PageddError("forbidden")`.
        """
        await self._daemon.order(Sleep(id=next(self._ids)), Ok, waits=True)

    async def wake(self) -> None:
        """Have the engine load now instead of at the next request. Raises like `sleep`."""
        await self._daemon.order(Wake(id=next(self._ids)), Ok)

    async def load(self, model: str, served_name: str | None = None) -> None:
        """Serve another model; returns when it is served, which takes as long as a start.

        Through the admin socket. Raises `PageddError` when it is not; the one before is served on.
        """
        order = Load(id=next(self._ids), model=model, served_name=served_name)
        await self._daemon.order(order, Ok, waits=True)

    async def _read_state(self) -> str:
        return (await self.ping()).state


class Generation:
    """One request. `async for` gives its `Delta`s as they come; `await` gives the `Done` with whole texts and usage.

    Awaiting after iterating gives the `Done` of the same request. Leaving the iteration early, or cancelling the task
    that waits, cancels the request.

    Attributes:
        id: this client's name for the request.
        request_id: the daemon's, as `pagectl ps` and the log show it; None until the daemon has accepted.
    """

    def __init__(self, client: AsyncClient, id: str, request: Callable[[str, bool], Generate | Chat]) -> None:
        self.id = id
        self.request_id: str | None = None
        self._client = client
        self._request = request
        self._is_sent = False
        self._done: Done | None = None
        self._load_wait = LoadWait(client._load_wait_s, client._on_load_wait)

    def __aiter__(self) -> AsyncGenerator[Delta, None]:
        return self._run(stream=True)

    def __await__(self) -> Generator[Any, None, Done]:
        return self.result().__await__()

    async def result(self) -> Done:
        """The whole answer. Raises `PageddError` when the request was refused or broke."""
        if self._done is None:
            async for _ in self._run(stream=False):
                pass
        assert self._done is not None
        return self._done

    async def cancel(self) -> None:
        """End the request; whoever reads it gets what there is, with `finish_reason` `abort`."""
        await self._client.cancel(self)

    async def _run(self, stream: bool) -> AsyncGenerator[Delta, None]:
        if self._is_sent:
            raise RuntimeError("a generation can be read once; call generate() or chat() again")
        self._is_sent = True
        connection = await self._client._daemon.requests()
        inbox = connection.post(self._request(self.id, stream))
        self._client._generations[self.id] = self
        is_held = has_ended = False
        try:
            while True:
                message = await (self._load_wait.until_awake(inbox.get()) if is_held else inbox.get())
                is_held = isinstance(message, Waking)
                match message:
                    case Waking():
                        self.request_id = message.request_id
                    case Accepted():
                        self.request_id = message.request_id
                    case Delta():
                        yield message
                    case Done():
                        has_ended = True
                        self._done = message
                        return
                    case Failed(code="engine_loading") if not self._load_wait.is_over:
                        await self._load_wait.until_loaded(self._client._read_state)
                        inbox = connection.post(self._request(self.id, stream))
                    case _:
                        has_ended = True
                        raise as_error(message)
        finally:
            del self._client._generations[self.id]
            connection.forget(self.id)
            if not has_ended:
                connection.tell(Cancel(id=next(self._client._ids), target=self.id))


def _conversation(messages: Iterable[ChatMessage | Mapping[str, str]]) -> list[ChatMessage]:
    try:
        return msgspec.convert(list(messages), list[ChatMessage])
    except msgspec.ValidationError as error:
        raise PageddError("invalid_type", f"messages: {error}", field="messages") from error
