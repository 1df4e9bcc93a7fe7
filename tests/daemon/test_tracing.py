"""The spans of a request, in memory instead of on their way to a collector."""

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pagedd.client.aio import AsyncClient
from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, ChatMessage, DaemonMessage, Done, Failed, Generate, Sampling
from pagedd.daemon.caller import Caller
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.service import Service
from pagedd.daemon.tracing import Tracing

from .byte_model import write_model
from .scripted_host import ScriptedHost
from .served import serving
from .waiting import until

export = pytest.importorskip("opentelemetry.sdk.trace.export")


@pytest.fixture
def spans() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture(autouse=True)
def kept(spans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pagedd.daemon.service.Tracing", lambda endpoint: Tracing(endpoint, export.SimpleSpanProcessor(spans))
    )


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
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


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize("transport", ["http", "zmq"])
async def test_a_span_is_a_child_of_its_callers_over_both_transports(
    socket_folder: Path, spans: Any, transport: str
) -> None:
    context = {"traceparent": SAMPLED, "tracestate": "vendor=1,other=2"}
    async with serving(socket_folder, otel_endpoint="http://collector") as served:
        if transport == "http":
            body = {"prompt": ["a", "b"], "max_tokens": 1}
            async with served.http.post("http://localhost/v1/completions", json=body, headers=context) as response:
                assert response.status == 200
        else:
            async with AsyncClient(served.endpoints.directory) as client:
                await client.generate("a", max_tokens=1, trace_context=context)
                await client.chat([{"role": "user", "content": "a"}], max_tokens=1, trace_context=context)
        every = spans.get_finished_spans()
    roots = [span for span in every if span.parent.is_remote]
    assert [f"{root.parent.span_id:016x}" for root in roots] == [SPAN, SPAN]
    assert {f"{span.context.trace_id:032x}" for span in every} == {TRACE}
    assert {span.context.trace_state.to_header() for span in roots} == {"vendor=1,other=2"}


@pytest.mark.parametrize(
    ("traceparent", "tracestate"),
    [
        ("", None),
        ("garbage", "vendor=1"),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"{SAMPLED}-more", None),
        ("0" * 10**6, "a=1," * 10**5),
        ("\x00\ud7ff" * 20, None),
        (None, "vendor=1"),
    ],
    ids=lambda value: repr(value)[:20],
)
async def test_a_caller_that_names_no_span_of_its_own_begins_a_trace(
    service: Service, spans: Any, caplog: pytest.LogCaptureFixture, traceparent: str | None, tracestate: str | None
) -> None:
    message = Generate(
        id="a", prompt="x", sampling=Sampling(max_tokens=1), traceparent=traceparent, tracestate=tracestate
    )
    assert isinstance(await ask(service, message), Done)
    *_, root = spans.get_finished_spans()
    assert root.parent is None
    assert root.context.trace_state.to_header() == ""
    assert (message.traceparent, message.tracestate) == (None, None), "nothing of it is kept for as long as it runs"
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


@pytest.mark.parametrize("tracestate", ["=", "a=1," * 100, "a" * 600, "\n=1", "K=v"])
async def test_a_state_that_is_malformed_is_left_out_and_the_parent_holds(
    service: Service, spans: Any, caplog: pytest.LogCaptureFixture, tracestate: str
) -> None:
    await ask(service, Generate(id="a", prompt="x", traceparent=SAMPLED, tracestate=tracestate))
    *_, root = spans.get_finished_spans()
    assert f"{root.parent.span_id:016x}" == SPAN
    assert root.context.trace_state.to_header() in ("", "a=1")
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_a_caller_that_does_not_sample_its_trace_gets_no_span(service: Service, spans: Any) -> None:
    done = await ask(service, Generate(id="a", prompt="x", traceparent=f"00-{TRACE}-{SPAN}-00"))
    assert isinstance(done, Done)
    assert spans.get_finished_spans() == ()


async def test_two_parents_are_none(socket_folder: Path, spans: Any) -> None:
    headers = [("traceparent", SAMPLED), ("traceparent", SAMPLED)]
    async with serving(socket_folder, otel_endpoint="http://collector") as served:
        body = {"prompt": "a", "max_tokens": 1}
        async with served.http.post("http://localhost/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
        *_, root = spans.get_finished_spans()
    assert root.parent is None


def test_without_the_package_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(PageddError, match=r"install pagedd\[otel\]"):
        Tracing("http://collector")


def test_off_loads_nothing_of_it() -> None:

    program = "import sys, pagedd.daemon.server; print([name for name in sys.modules if 'opentel' in name])"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
