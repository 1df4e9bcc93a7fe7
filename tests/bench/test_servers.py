"""Servers under measurement: peers are found where they lie, asked in their own way, and leave nothing behind."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pagedd.bench import servers
from pagedd.bench.load import LoadRequest
from pagedd.bench.servers import peer_servers

LOAD = [LoadRequest([11, 12, 13], 4), LoadRequest([14], 2)]

HTTP_PEER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200); self.end_headers()
        for _ in range(asked["max_tokens"] - SHORT):
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}\\n\\n')
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""

PIPED_PEER = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    number = sum(count for _, count in asked["requests"])
    print(asked["one_by_one"], len(asked["requests"]), file=sys.stderr, flush=True)
    print(json.dumps({"duration_s": 0.5, "num_output_tokens": number}), flush=True)
"""


@pytest.fixture
def peers(tmp_path: Path) -> Callable[..., dict[str, servers.Server]]:
    """A folder of peers whose programs are Python scripts: path below the folder -> source."""

    def make(**programs: str) -> dict[str, servers.Server]:
        paths = {"llama": "lc/build/bin/llama-server", "vllm": "vv/bin/vllm", "openvino": "ov/bin/python"}
        for name, source in programs.items():
            path = tmp_path / paths[name]
            path.parent.mkdir(parents=True)
            path.write_text(f"#!{sys.executable}\n{source}")
            path.chmod(0o755)
        (tmp_path / "models/smol").mkdir(parents=True)
        for weights in ("smol-Q4_0.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"):
            (tmp_path / "models" / weights).touch()
        return {server.name: server for server in peer_servers(tmp_path)}

    return make


def test_a_peer_is_absent_when_its_program_or_its_weights_are(peers, tmp_path: Path):
    found = peers(llama="")
    assert [name for name, server in found.items() if not server.absent] == ["llama.cpp"]
    assert found["vllm"].absent == [tmp_path / "vv/bin/vllm"]
    (tmp_path / "models/smol-Q4_0.gguf").unlink()
    assert found["llama.cpp"].absent == [tmp_path / "models/smol-Q4_0.gguf"]


async def test_an_http_peer_is_asked_for_the_load_and_stopped(peers):
    async with peers(llama=HTTP_PEER.replace("SHORT", "0"))["llama.cpp"].start() as running:
        outcome = await running.run(LOAD, concurrency=2)
        process = psutil.Process(running.pid)
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (4, 6)
    assert outcome.ttft_p50_s > 0
    assert not process.is_running()


async def test_a_peer_that_gives_fewer_tokens_than_asked_for_is_an_error(peers):
    async with peers(vllm=HTTP_PEER.replace("SHORT", "1"))["vllm"].start() as running:
        with pytest.raises(RuntimeError, match="asked for 6 tokens, got 4"):
            await running.run(LOAD, concurrency=2)


@pytest.mark.parametrize(("concurrency", "one_by_one"), [(1, "True"), (32, "False")])
async def test_a_piped_peer_is_warmed_up_and_given_the_whole_load(peers, concurrency: int, one_by_one: str):
    async with peers(openvino=PIPED_PEER)["openvino"].start() as running:
        outcome = await running.run(LOAD, concurrency=concurrency)
        assert running.log.read_text().splitlines() == ["True 1", f"{one_by_one} 2"]
        process = psutil.Process(running.pid)
    assert (outcome.duration_s, outcome.num_prompt_tokens, outcome.num_output_tokens) == (0.5, 4, 6)
    assert outcome.output_tokens_per_s == 12.0
    assert outcome.total_tokens_per_s == 20.0
    assert not process.is_running()


@pytest.mark.parametrize("name", ["llama.cpp", "openvino"])
async def test_a_peer_that_ends_at_once_is_an_error_with_its_log(peers, name: str):
    source = "import sys; sys.exit('no AVX here')"
    with pytest.raises(RuntimeError, match="no AVX here"):
        async with peers(llama=source, openvino=source)[name].start():
            pytest.fail("it cannot be ready")


async def test_what_a_peer_started_is_ended_with_it(peers):
    source = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, file=sys.stderr, flush=True)\n"
    async with peers(openvino=source + PIPED_PEER)["openvino"].start() as running:
        orphan = psutil.Process(int(running.log.read_text()))
    with contextlib.suppress(psutil.NoSuchProcess):
        orphan.wait(5)
    assert not orphan.is_running()


async def test_a_peer_that_ignores_the_signal_to_stop_is_killed(peers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(servers, "STOP_TIMEOUT_S", 0.1)
    source = f"import signal; signal.signal({int(signal.SIGTERM)}, signal.SIG_IGN)\n"
    async with peers(openvino=source + PIPED_PEER)["openvino"].start() as running:
        pid = running.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
