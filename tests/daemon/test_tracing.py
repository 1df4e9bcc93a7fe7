"""The spans of a request, in memory instead of on their way to a collector."""

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, ChatMessage, DaemonMessage, Done, Failed, Generate, Sampling
from pagedd.daemon.caller import Caller
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.service import Service
from pagedd.daemon.tracing import Tracing

from .scripted import ScriptedHost, until, write_model

export = pytest.importorskip("opentelemetry.sdk.trace.export")


@pytest.fixture
def spans() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture
async def service(tmp_path: Path, spans: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setattr(
        "pagedd.daemon.service.Tracing", lambda endpoint: Tracing(endpoint, export.SimpleSpanProcessor(spans))
    )
    service = Service(DaemonConfig(otel_endpoint="http://collector"), ScriptedHost())
    service.set_model(write_model(tmp_path))
    yield service
    await service.close()


async def ask(service: Service, message: Generate | Chat) -> DaemonMessage:
    heard: list[DaemonMessage] = []
    service.start([message], Caller(uid=1001), heard.append)
    await until(lambda: bool(heard) and isinstance(heard[-1], Done | Failed))
    return heard[-1]


async def test_a_request_is_a_span_with_its_lengths_and_its_parts_in_it(service: Service, spans: Any) -> None:
    sampling = Sampling(max_tokens=4, temperature=0.5)
    done = await ask(service, Generate(id="a", prompt="secret", sampling=sampling))
    assert isinstance(done, Done)
    *parts, root = spans.get_finished_spans()
    assert (root.name, root.parent) == ("text_completion bytes", None)
    assert root.attributes["gen_ai.response.id"] == done.request_id
    assert {name: root.attributes[f"gen_ai.{name}"] for name in ("usage.input_tokens", "usage.output_tokens")} == {
        "usage.input_tokens": 6,
        "usage.output_tokens": 4,
    }
    assert root.attributes["gen_ai.request.temperature"] == 0.5
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert {part.parent.span_id for part in parts} == {root.context.span_id}
    assert [part.name for part in parts][:: len(parts) - 1] == ["queue", "decode"]
    times = [time for part in parts for time in (part.start_time, part.end_time)]
    assert times == sorted(times)
    assert (root.start_time, root.end_time) == (times[0], times[-1])
    assert all("secret" not in str(span.attributes) for span in (*parts, root))


async def test_a_request_that_breaks_is_a_span_with_its_code(service: Service, spans: Any) -> None:
    await ask(service, Chat(id="a", messages=[ChatMessage(role="cursed", content="x")]))
    part, root = spans.get_finished_spans()
    assert (part.name, root.name) == ("queue", "chat bytes")
    assert root.attributes["error.type"] == "template_error"
    assert not root.status.is_ok


def test_without_the_package_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(PageddError, match=r"install pagedd\[otel\]"):
        Tracing("http://collector")


def test_off_loads_nothing_of_it() -> None:

    program = "import sys, pagedd.daemon.server; print([name for name in sys.modules if 'opentel' in name])"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
