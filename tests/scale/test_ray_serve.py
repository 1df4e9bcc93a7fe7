"""Two daemons as replicas of a real Ray Serve; skipped where Ray is not installed (`pip install '.[ray]'`)."""

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install '.[ray]'")
pytestmark = pytest.mark.slow

SYSTEMS = [
    "You are a careful clerk who counts every block and writes down what is seen, page by page, in a large book.",
    "Answer as a sailor would, at length, with the weather of the day and the state of the rigging and the sea.",
]


@pytest.fixture(scope="module")
def address(model_gguf: Path) -> Iterator[str]:
    """Where two replicas answer."""
    import ray
    from ray import serve

    from pagedd.scale.ray_serve import build

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    flags = f"--model {model_gguf} --device cpu --num-blocks 256 --num-threads 1 --kv-quality-check off"
    try:
        serve.start(http_options={"port": 18400})
        serve.run(build({"flags": flags, "replicas": "2"}))
        yield "http://127.0.0.1:18400"
    finally:
        serve.shutdown()
        ray.shutdown()


def post(address: str, path: str, **fields: Any) -> tuple[int, str, str]:
    """Status, replica and body of the answer."""
    request = urllib.request.Request(
        address + path, json.dumps(fields).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.headers["X-Pagedd-Replica"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["X-Pagedd-Replica"], error.read().decode()


def chat(address: str, system: str, question: str, **fields: Any) -> tuple[int, str, str]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return post(address, "/v1/chat/completions", messages=messages, max_tokens=4, temperature=0, **fields)


def test_chats_that_begin_alike_go_to_the_replica_that_has_their_beginning(address: str) -> None:
    first = [chat(address, system, "Who are you?")[1] for system in SYSTEMS]
    assert first[0] != first[1]
    for question in ("What is a page?", "How is the sea?", "And tomorrow?"):
        for system, replica in zip(SYSTEMS, first, strict=True):
            status, by, body = chat(address, system, question)
            assert (status, by) == (200, replica)
            assert json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_many_at_once_are_all_answered(address: str) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: chat(address, SYSTEMS[n % 2], f"What is {n}?"), range(32)))
    assert [status for status, _, _ in answers] == [200] * 32


def test_an_answer_is_streamed_and_a_refusal_keeps_its_status_and_code(address: str) -> None:
    status, _, body = chat(address, SYSTEMS[0], "Who are you?", stream=True)
    assert status == 200
    assert body.endswith("data: [DONE]\n\n")
    assert len(body.split("\n\n")) > 3
    status, _, body = post(address, "/v1/completions", prompt="Once", max_tokens=100_000)
    assert (status, json.loads(body)["error"]["code"]) == (400, "prompt_too_long")
    assert post(address, "/v1/completions", prompt="")[0] == 400
    status, _, body = post(address, "/v1/completions", prompt="x" * (9 << 20))
    assert (status, json.loads(body)["error"]["code"]) == (413, "message_too_large")


def test_what_only_administrators_may_do_is_not_relayed(address: str) -> None:
    assert post(address, "/sleep")[0] == 404


def test_a_daemon_that_dies_costs_no_request_that_comes_after(address: str) -> None:
    _, replica, _ = chat(address, SYSTEMS[0], "Who are you?")
    os.kill(int(replica.split("/")[1]), signal.SIGKILL)
    answers = [chat(address, SYSTEMS[n % 2], f"What is {n}?") for n in range(10)]
    assert [status for status, _, _ in answers] == [200] * 10
    assert replica not in {by for _, by, _ in answers}


def test_an_argument_that_is_no_number_is_named() -> None:
    from pagedd.scale.ray_serve import build

    with pytest.raises(ValueError, match="replicas = two: it is a whole number"):
        build({"replicas": "two"})
