"""The servers that `serving.py` compares: how each is started, without guesses but for pagedd's, asked, and stopped.

Owns command lines and processes. What is asked of them, and what is made of the answers, is `serving.py`'s.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp
import psutil

from pagedd.bench.daemon_process import free_port, running_daemon
from pagedd.bench.load import LoadClient, LoadRequest, percentile

SEATS = 32
READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """What a server did with one load. `ttft_p50_s` is None for one that does not stream."""

    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_p50_s: float | None

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.duration_s

    @property
    def total_tokens_per_s(self) -> float:
        return (self.num_prompt_tokens + self.num_output_tokens) / self.duration_s


class RunningServer(Protocol):
    """A server that is ready. `ready_s` counts from the start of its process, `pid`."""

    @property
    def pid(self) -> int: ...
    @property
    def ready_s(self) -> float: ...

    async def run(self, load: Sequence[LoadRequest], *, concurrency: int) -> LoadOutcome:
        """Sends the whole load. Raises `RuntimeError` when the server does not do all of it."""
        ...


@dataclass(frozen=True, slots=True)
class Server:
    """One that can be started. `needs` are the files without which it is absent."""

    name: str
    needs: tuple[Path, ...]
    start: Callable[[], AbstractAsyncContextManager[RunningServer]]

    @property
    def absent(self) -> list[Path]:
        return [path for path in self.needs if not path.exists()]


def pagedd_server(weights: Path, flags: Sequence[str]) -> Server:
    """This checkout, asked over its Unix socket."""
    command = ["--model", str(weights.absolute()), "--max-num-seqs", str(SEATS), *flags]

    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[RunningServer]:
        async with running_daemon(command) as daemon:
            client = LoadClient("http://localhost", unix_socket=str(daemon.http_socket))
            yield _HttpServer(daemon.pid, daemon.ready_s, client)

    return Server("pagedd", (weights,), start)


def peer_servers(folder: Path) -> list[Server]:
    """The peers that may lie in `folder`, each with the weights and settings that serve it best on a CPU."""
    num_cpus, models = len(os.sched_getaffinity(0)), folder / "models"

    llama, q4_0 = folder / "lc/build/bin/llama-server", models / "smol-Q4_0.gguf"
    llama_flags = f"-t {num_cpus} -c 65536 -np {SEATS} -cb -fa on --no-webui".split()

    vllm, safetensors = folder / "vv/bin/vllm", models / "smol"
    vllm_flags = f"--served-model-name m --dtype bfloat16 --max-num-seqs {SEATS} --max-model-len 4096".split()
    vllm_environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_NO_USAGE_STATS": "1",
    }

    openvino, q4_1 = folder / "ov/bin/python", models / "SmolLM2-135M-Instruct.Q4_1.gguf"
    worker = Path(__file__).with_name("openvino_worker.py")

    return [
        Server("llama.cpp", (llama, q4_0), lambda: _http([str(llama), "-m", str(q4_0), *llama_flags])),
        Server(
            "vllm",
            (vllm, safetensors),
            lambda: _http(
                [str(vllm), "serve", str(safetensors), *vllm_flags, "--enable-prefix-caching"], vllm_environment
            ),
        ),
        Server("openvino", (openvino, q4_1), lambda: _piped([str(openvino), "-P", str(worker), str(q4_1)])),
    ]


@dataclass(frozen=True, slots=True)
class _HttpServer:
    pid: int
    ready_s: float
    client: LoadClient

    async def run(self, load: Sequence[LoadRequest], *, concurrency: int) -> LoadOutcome:
        result = await self.client.run(load, concurrency=concurrency)
        _check_length(result.num_output_tokens, load)
        ttft_p50_s = percentile((timing.ttft_s for timing in result.timings), 0.5)
        return LoadOutcome(result.duration_s, result.num_prompt_tokens, result.num_output_tokens, ttft_p50_s)


@dataclass(frozen=True, slots=True)
class _PipedServer:
    """A worker that answers each line on its input with one on its output; see `openvino_worker.py`."""

    pid: int
    ready_s: float
    process: subprocess.Popen[str]
    log: Path

    async def run(self, load: Sequence[LoadRequest], *, concurrency: int) -> LoadOutcome:
        await self._ask([LoadRequest([17] * 16, 8)], one_by_one=True)  # warm-up
        # Its own seats bound how many of the queued requests run at once.
        answer = await self._ask(load, one_by_one=concurrency == 1)
        num_output_tokens = int(answer["num_output_tokens"])
        _check_length(num_output_tokens, load)
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in load)
        return LoadOutcome(answer["duration_s"], num_prompt_tokens, num_output_tokens, None)

    async def _ask(self, load: Sequence[LoadRequest], *, one_by_one: bool) -> dict[str, float]:
        requests = [[request.prompt_token_ids, request.num_output_tokens] for request in load]
        question = json.dumps({"requests": requests, "one_by_one": one_by_one})
        return await asyncio.to_thread(_exchange, self.process, question + "\n", self.log)


@contextlib.asynccontextmanager
async def _http(command: list[str], environment: dict[str, str] | None = None) -> AsyncIterator[RunningServer]:
    """A server with `/health`, on a TCP port of its own."""
    port, started = free_port(), time.perf_counter()
    url = f"http://127.0.0.1:{port}"
    async with _process([*command, "--port", str(port)], environment=environment) as (process, log):
        while not await _is_healthy(url):
            if process.poll() is not None or time.perf_counter() - started > READY_TIMEOUT_S:
                raise RuntimeError(f"{command[0]} is not ready; its log ends with:\n{_tail(log)}")
            await asyncio.sleep(0.1)
        yield _HttpServer(process.pid, time.perf_counter() - started, LoadClient(url, model="m"))


@contextlib.asynccontextmanager
async def _piped(command: list[str]) -> AsyncIterator[RunningServer]:
    started = time.perf_counter()
    async with _process(command, has_pipes=True) as (process, log):
        await asyncio.to_thread(_exchange, process, "", log)
        yield _PipedServer(process.pid, time.perf_counter() - started, process, log)


@contextlib.asynccontextmanager
async def _process(
    command: list[str], *, environment: dict[str, str] | None = None, has_pipes: bool = False
) -> AsyncIterator[tuple[subprocess.Popen[str], Path]]:
    """Runs `command` until the block ends; what it prints is in the log, unless its output is one of the pipes."""
    with tempfile.TemporaryDirectory(prefix="pagedd-bench-") as directory:
        log = Path(directory) / "log"
        with log.open("wb") as log_file:
            process = subprocess.Popen(  # noqa: ASYNC220 (returns at once)
                command,
                stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if has_pipes else log_file,
                stderr=log_file,
                env=os.environ | (environment or {}),
                text=True,
            )
        try:
            yield process, log
        finally:
            await asyncio.to_thread(_stop_tree, process)


def _stop_tree(process: subprocess.Popen[str]) -> None:
    """Asks the process to end, kills it when it has not after half a minute, then kills what is left below it."""
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for descendant in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _exchange(process: subprocess.Popen[str], question: str, log: Path) -> dict[str, float]:
    """Writes a line, or nothing, and waits for the next answer."""
    line = ""
    if process.stdin is not None and process.stdout is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(question)
            process.stdin.flush()
            line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"process {process.pid} ended; its log ends with:\n{_tail(log)}")
    answer: dict[str, float] = json.loads(line)
    return answer


async def _is_healthy(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError):
        return False


def _check_length(num_output_tokens: int, load: Sequence[LoadRequest]) -> None:
    num_asked = sum(request.num_output_tokens for request in load)
    if num_output_tokens != num_asked:
        raise RuntimeError(f"asked for {num_asked} tokens, got {num_output_tokens}")


def _tail(log: Path, num_characters: int = 2000) -> str:
    return log.read_text(errors="replace")[-num_characters:]
