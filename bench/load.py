"""Load client for any server with OpenAI's `/v1/completions`, over TCP or a Unix socket.

    python -P -m pagedd.bench.load throughput --unix $XDG_RUNTIME_DIR/pagedd/http.sock
    python -P -m pagedd.bench.load single -n 4 --concurrency 1 --url http://127.0.0.1:8000 --model m

Prompts are token ids drawn from a fixed seed, so that every server gets the same work; outputs are greedy, streamed,
and go on past the end of sequence, so that each has the length asked for. A second run with the same seed finds the
prompts in the server's prefix cache: change `--seed`, or restart the server.

    throughput   n requests, prompts of 32 to 256 tokens, outputs of 32 to 128
    single       n requests, prompt 128, output 128; meant for --concurrency 1
    prefix       n requests that share 512 tokens and differ in the next 32, output 32
    longprompt   n requests, prompt 1024, output 16

Time to first token counts from when the request is sent, not from when it waits for one of this client's seats.
"""

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import aiohttp

from pagedd.bench.report import Cell, print_report

DEFAULT_COUNTS = {"throughput": 64, "single": 4, "prefix": 32, "longprompt": 8}


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One completion to ask for: so many tokens after these."""

    prompt_token_ids: list[int]
    num_output_tokens: int


@dataclass(slots=True)
class Timing:
    """What one request saw. Times are seconds; `gaps_s` are those between one streamed chunk and the next."""

    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float
    e2e_s: float
    gaps_s: list[float]


@dataclass(slots=True)
class LoadResult:
    """One run of a load. `duration_s` is from the first request sent to the last token received."""

    duration_s: float
    num_output_tokens_asked: int
    timings: list[Timing] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        return sum(t.num_output_tokens for t in self.timings)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(t.num_prompt_tokens for t in self.timings)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.duration_s

    def figures(self) -> dict[str, Cell]:
        """Rates, and percentiles over requests (ttft) or over all gaps of all requests (itl)."""
        ttfts = [t.ttft_s for t in self.timings]
        gaps = [gap for t in self.timings for gap in t.gaps_s]
        return {
            "num_requests": len(self.timings),
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_output_tokens_asked": self.num_output_tokens_asked,
            "duration_s": round(self.duration_s, 3),
            "output_tokens_per_s": round(self.output_tokens_per_s, 1),
            "total_tokens_per_s": round((self.num_output_tokens + self.num_prompt_tokens) / self.duration_s, 1),
            "ttft_p50_ms": _milliseconds(percentile(ttfts, 0.50)),
            "ttft_p95_ms": _milliseconds(percentile(ttfts, 0.95)),
            "itl_p50_ms": _milliseconds(percentile(gaps, 0.50)),
            "itl_p99_ms": _milliseconds(percentile(gaps, 0.99)),
        }


def make_load(kind: str, num_requests: int, *, vocab_size: int = 49152, seed: int = 7) -> list[LoadRequest]:
    """The requests of one load, the same for the same arguments. Ids below 10 are left out: they tend to be special."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(10, vocab_size) for _ in range(count)]

    if kind == "throughput":
        # The prompt is drawn before the output's length, request by request.
        return [LoadRequest(ids(draw.randint(32, 256)), draw.randint(32, 128)) for _ in range(num_requests)]
    if kind == "single":
        return [LoadRequest(ids(128), 128) for _ in range(num_requests)]
    if kind == "prefix":
        prefix = ids(512)
        return [LoadRequest(prefix + ids(32), 32) for _ in range(num_requests)]
    if kind == "longprompt":
        return [LoadRequest(ids(1024), 16) for _ in range(num_requests)]
    raise ValueError(f"unknown load {kind!r}; there are {', '.join(DEFAULT_COUNTS)}")


class LoadClient:
    """Sends requests to one server, each over a connection of its own.

    Args:
        url: of the server; over a Unix socket only its path part matters.
        unix_socket: path of the socket to connect to instead of the URL's host.
        api_key: to show, if any.
    """

    def __init__(
        self, url: str, *, model: str = "default", unix_socket: str | None = None, api_key: str | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._unix_socket = unix_socket
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    async def run(self, load: Sequence[LoadRequest], *, concurrency: int = 32, num_warmups: int = 2) -> LoadResult:
        """Sends the whole load, at most `concurrency` requests at once. Raises `RuntimeError` for any that fails."""
        seats = asyncio.Semaphore(concurrency)
        async with self._session() as session:

            async def one(request: LoadRequest) -> Timing:
                async with seats:
                    return await self._complete(session, request)

            for i in range(num_warmups):
                await self._complete(session, LoadRequest([17 + i] * 16, 8))
            started = time.perf_counter()
            timings = await asyncio.gather(*map(one, load))
            duration_s = time.perf_counter() - started
        return LoadResult(duration_s, sum(request.num_output_tokens for request in load), timings)

    def _session(self) -> aiohttp.ClientSession:
        connector = (
            aiohttp.UnixConnector(self._unix_socket, limit=0, force_close=True)
            if self._unix_socket
            else aiohttp.TCPConnector(limit=0, force_close=True)
        )
        timeout = aiohttp.ClientTimeout(total=3600)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)

    async def _complete(self, session: aiohttp.ClientSession, request: LoadRequest) -> Timing:
        body = {
            "model": self._model,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = time.perf_counter()
        arrivals: list[float] = []
        num_output_tokens: int | None = None
        async with session.post(self._url + "/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise RuntimeError(f"the stream ended with an error: {event['error']}")
                if event.get("choices"):
                    arrivals.append(time.perf_counter())
                if event.get("usage"):
                    num_output_tokens = event["usage"]["completion_tokens"]
        if not arrivals:
            raise RuntimeError(f"a stream of {request.num_output_tokens} tokens ended without one")
        return Timing(
            num_prompt_tokens=len(request.prompt_token_ids),
            # A server that gives no usage is taken to send one token a chunk.
            num_output_tokens=num_output_tokens if num_output_tokens is not None else len(arrivals),
            ttft_s=arrivals[0] - sent,
            e2e_s=arrivals[-1] - sent,
            gaps_s=[later - earlier for earlier, later in itertools.pairwise(arrivals)],
        )


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that is above `share` of all; `None` of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=DEFAULT_COUNTS)
    parser.add_argument("--url", default="http://localhost", help="of the server (default %(default)s)")
    parser.add_argument("--unix", metavar="PATH", help="connect to this Unix socket instead of the URL's host")
    parser.add_argument("--model", default="default", help="name to ask for (default %(default)s)")
    parser.add_argument("-n", type=int, help="requests; by default as many as the load's usual")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at once (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=49152, help="token ids are below this (default %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="of the prompts (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="small requests sent before (default %(default)s)")
    args = parser.parse_args()

    num_requests = DEFAULT_COUNTS[args.kind] if args.n is None else args.n
    load = make_load(args.kind, num_requests, vocab_size=args.vocab, seed=args.seed)
    client = LoadClient(args.url, model=args.model, unix_socket=args.unix)
    result = asyncio.run(client.run(load, concurrency=args.concurrency, num_warmups=args.warmup))
    figures = result.figures()
    rows = [{"figure": name, "value": value} for name, value in figures.items()]
    settings = {"load": args.kind, "concurrency": args.concurrency, "seed": args.seed}
    print_report("load", rows, settings | figures)


if __name__ == "__main__":
    main()
