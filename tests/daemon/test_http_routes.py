"""What HTTP answers beside tokens: states, models, token ids, and refusals of what is no question."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.telemetry import TelemetryCollector

from .scripted_host import ScriptedHost
from .served import Served, serving
from .waiting import WAIT_S, until


async def test_health_is_live_and_ready_is_not_while_the_model_loads(served: Served) -> None:
    served.host.state, served.host.detail, served.host.progress = EngineState.LOADING, "weights", 0.43
    assert await served.get("/health") == (
        200,
        {"status": "live", "state": "loading", "detail": "loading, 43 % (weights)"},
    )
    async with served.http.get("http://localhost/ready") as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert "loading, 43 %" in await response.text()
    served.host.state = EngineState.READY
    assert await served.get("/ready") == (200, {"status": "ready"})


async def test_before_there_is_a_model_every_path_answers(socket_folder: Path) -> None:
    host = ScriptedHost(state=EngineState.STARTING, info=None, stats=None)
    async with serving(socket_folder, host, has_model=False) as served:
        assert (await served.get("/health"))[0] == 200
        assert (await served.get("/ready"))[0] == 503
        assert await served.get("/v1/models") == (200, {"object": "list", "data": []})
        assert (await served.get("/v1/models/default"))[0] == 503
        assert (await served.post("/v1/completions", {"prompt": "a"}))[0] == 503
        assert (await served.post("/tokenize", {"prompt": "a"}))[0] == 503
        async with served.http.get("http://localhost/metrics") as response:
            assert response.status == 200


async def test_a_driver_that_takes_its_time_holds_up_nobody_but_who_asks_for_its_figures(served: Served) -> None:
    asked, answers = threading.Event(), threading.Event()

    def figures() -> dict[str, float | None]:
        asked.set()
        assert answers.wait(WAIT_S)
        return {"gpu_power_watts": 35.5}

    served.service.metrics.machine_registry.register(TelemetryCollector(figures))

    async def read() -> str:
        async with served.http.get("http://localhost/metrics") as response:
            return await response.text()

    reading = asyncio.create_task(read())
    await until(asked.is_set)
    assert (await served.get("/health"))[0] == 200
    answers.set()
    text = await reading
    assert "pagedd:gpu_power_watts 35.5" in text
    assert "vllm:num_requests_running" in text


async def test_models_lists_the_served_one(served: Served) -> None:
    status, models = await served.get("/v1/models")
    assert (status, models["data"][0]["id"], models["data"][0]["max_model_len"]) == (200, "bytes", 2048)
    assert (await served.get("/v1/models/bytes"))[0] == 200
    status, answer = await served.get("/v1/models/gpt-4")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_tokenize_gives_the_ids_that_a_request_would_have(served: Served) -> None:
    assert await served.post("/tokenize", {"prompt": "hé"}) == (
        200,
        {"tokens": [104, 195, 169], "count": 3, "max_model_len": 2048},
    )
    question = {"messages": [{"role": "user", "content": "hi"}]}
    _, chat = await served.post("/tokenize", question)
    await served.post("/v1/chat/completions", question)
    assert chat["tokens"] == served.host.submitted[0].prompt_token_ids
    assert await served.post("/detokenize", {"tokens": [104, 195, 169]}) == (200, {"prompt": "hé"})


@pytest.mark.parametrize(
    ("path", "body", "code", "field"),
    [
        ("/tokenize", {}, "missing_field", "prompt"),
        ("/tokenize", {"prompt": ""}, "empty_prompt", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "invalid_value", "prompt"),
        ("/tokenize", {"messages": []}, "empty_messages", "messages"),
        ("/detokenize", {"tokens": [259]}, "token_out_of_vocabulary", "tokens"),
        ("/detokenize", {"tokens": "a"}, "invalid_type", "tokens"),
        ("/detokenize", {}, "missing_field", "tokens"),
        ("/v1/completions", {}, "missing_field", "prompt"),
        ("/v1/completions", [], "invalid_type", None),
        ("/v1/completions", b"", "malformed_message", None),
        ("/v1/completions", b"{", "malformed_message", None),
        ("/v1/completions", b"\x80\x04K\x01.", "malformed_message", None),
        ("/v1/completions", b"[" * 100_000, "invalid_type", None),
        ("/v1/completions", b'{"prompt": ' + b"[" * 100_000, "malformed_message", None),
        ("/v1/completions", b'{"prompt": "\xff"}', "malformed_message", None),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_bodies_that_are_wrong_are_refused_by_name(
    served: Served, path: str, body: Any, code: str, field: str | None
) -> None:
    status, answer = await served.post(path, body)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, field)


async def test_an_unknown_field_is_ignored_and_said(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for path, body in [
        ("/v1/completions", {"prompt": [5], "max_tokens": 1, "temperatur": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "usr": "u"}),
        ("/tokenize", {"prompt": "a", "promptt": ""}),
        ("/detokenize", {"tokens": [5], "token": 5}),
    ]:
        assert (await served.post(path, body))[0] == 200
    said = [record.getMessage() for record in caplog.records if "is not known here" in record.getMessage()]
    assert [line.split("'")[1] for line in said] == ["temperatur", "usr", "promptt", "token"]


async def test_an_unknown_path_or_method_is_an_error_object_too(served: Served) -> None:
    status, answer = await served.post("/v2/completions", {})
    assert (status, answer["error"]["code"]) == (404, "unknown_route")
    assert answer["error"]["message"] == "POST /v2/completions: there is no such path; /openapi.json lists them"
    async with served.http.get("http://localhost/v1/completions") as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], response.headers["Allow"]) == (405, "method_not_allowed", "POST")
        assert error["message"] == "GET /v1/completions: that path takes POST"
