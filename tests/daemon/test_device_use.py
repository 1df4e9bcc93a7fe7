"""Sleep, yield and load in each other's way: over a scripted host, and where it matters over real engine processes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pagedd.client.errors import PageddError
from pagedd.client.protocol import DaemonMessage, Done, Failed, Generate, Sampling
from pagedd.daemon.caller import Caller
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.engine_host import EngineHost
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.model_loading import Candidate
from pagedd.daemon.served_model import ServedModel
from pagedd.daemon.service import Service
from pagedd.engine.config import EngineConfig

from .fake_engine import Prompt
from .scripted import ScriptedHost, until, write_model
from .test_engine_host import FAKE_ENGINE

ANA, ADMIN = Caller(uid=1001), Caller(uid=0)


@pytest.fixture
def host() -> ScriptedHost:
    return ScriptedHost(reply=lambda request: None)


@pytest.fixture
async def service(host: ScriptedHost, tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(DaemonConfig(drain_seconds=30), host)
    service.set_model(write_model(tmp_path / "bytes"))
    yield service
    await service.close()


class Other:
    """Another model, `other`, which writes every prompt as [77]; `gate` holds up the look at it."""

    def __init__(self, folder: Path, service: Service, config: EngineConfig | None = None) -> None:
        self.text_side = ServedModel(write_model(folder / "other", name="other"), None)
        self.text_side.prompt_token_ids = self._token_ids  # type: ignore[method-assign]
        self.num_looks = 0
        self.num_closed = 0
        close = self.text_side.close

        def count_and_close() -> None:
            self.num_closed += 1
            close()

        self.text_side.close = count_and_close  # type: ignore[method-assign]
        self.gate = asyncio.Event()
        self.gate.set()
        self._config = config or EngineConfig(model="other")
        service.device.find_model = self._find

    async def _token_ids(self, message: object) -> list[int]:
        return [77]

    async def _find(self, name: str, served_name: str | None) -> Candidate:
        self.num_looks += 1
        await self.gate.wait()
        return Candidate(self.text_side, self._config)


@pytest.fixture
async def other(service: Service, tmp_path: Path) -> Other:
    return Other(tmp_path, service)


def start(service: Service, text: str = "ab", *, max_tokens: int = 3) -> list[DaemonMessage]:
    heard: list[DaemonMessage] = []
    service.start([Generate(id=text, prompt=text, sampling=Sampling(max_tokens=max_tokens))], ANA, heard.append)
    return heard


async def running(service: Service, host: ScriptedHost) -> list[DaemonMessage]:
    heard = start(service)
    await until(lambda: len(host.submitted) == 1)
    return heard


def finish(host: ScriptedHost, number: int = 0) -> None:
    host.produce(host.submitted[number].request_id, b"x", finish_reason="length")


def has_ended(heard: list[DaemonMessage]) -> bool:
    return bool(heard) and isinstance(heard[-1], Done | Failed)


def load(service: Service) -> asyncio.Task[None]:
    return asyncio.create_task(service.device.load_model("x", None, ADMIN))


# Sleep


async def test_a_second_sleep_returns_no_earlier_than_the_first(service: Service, host: ScriptedHost) -> None:
    await running(service, host)
    sleeps = [asyncio.create_task(service.device.sleep()) for _ in range(2)]
    await until(lambda: host.is_sleeping)
    await asyncio.sleep(0.01)
    assert [sleep.done() for sleep in sleeps] == [False, False]
    finish(host)
    await asyncio.gather(*sleeps)
    assert host.state is EngineState.ASLEEP


async def test_an_engine_that_wakes_when_it_is_put_to_sleep_serves_whom_it_wakes_for_and_then_sleeps(
    service: Service, host: ScriptedHost
) -> None:
    await service.device.sleep()
    heard = start(service)
    await until(lambda: host.state is EngineState.LOADING)
    sleep = asyncio.create_task(service.device.sleep())
    await asyncio.sleep(0.01)
    assert not sleep.done()
    host.get_up()
    await until(lambda: len(host.submitted) == 1)
    assert not sleep.done()
    finish(host)
    await sleep
    assert isinstance(heard[-1], Done)
    assert host.state is EngineState.ASLEEP


async def test_an_engine_that_is_idle_during_a_load_sleeps_after_it(
    service: Service, host: ScriptedHost, other: Other
) -> None:
    other.gate.clear()
    loading = load(service)
    await asyncio.sleep(0.01)
    await service.sleep_if_idle(0.001)
    assert host.state is EngineState.READY
    host.swap_failure = PageddError("no_kv_memory", "scripted")
    other.gate.set()
    with pytest.raises(PageddError):
        await loading
    await asyncio.sleep(0.01)
    await service.sleep_if_idle(60.0)
    assert host.state is EngineState.READY
    await service.sleep_if_idle(0.001)
    assert host.state is EngineState.ASLEEP


# Others who need the device


async def test_a_load_that_still_looks_at_its_model_yields_the_device_and_is_given_up(
    service: Service, host: ScriptedHost, other: Other
) -> None:
    other.gate.clear()
    loading = load(service)
    await asyncio.sleep(0)
    await service.device.yield_device("rivals", "game runs")
    assert (service.state, host.state) == ("yielding", EngineState.ASLEEP)
    other.gate.set()
    with pytest.raises(PageddError, match="device_yielded"):
        await loading
    assert (host.swapped, service.served_model().name, other.num_closed) == ([], "bytes", 1)
    await service.device.yield_device("rivals", None)
    assert host.num_wakes == 1


async def test_a_load_that_waits_for_running_requests_yields_the_device_and_is_given_up(
    service: Service, host: ScriptedHost, other: Other
) -> None:
    await running(service, host)
    loading = load(service)
    await until(lambda: host.is_sleeping)
    yielding = asyncio.create_task(service.device.yield_device("rivals", "game runs"))
    await until(lambda: service.state == "yielding")
    finish(host)
    await yielding
    with pytest.raises(PageddError, match="device_yielded"):
        await loading
    assert (host.swapped, host.state) == ([], EngineState.ASLEEP)
    await service.device.yield_device("rivals", None)
    assert host.num_wakes == 1, "it would serve, had nobody asked for the device"


async def test_while_the_engine_is_replaced_the_device_is_not_said_to_be_left(
    service: Service, host: ScriptedHost, other: Other
) -> None:
    host.exit_gate.clear()
    host.load_gate.clear()
    loading = load(service)
    await until(lambda: host.is_sleeping)
    await service.device.yield_device("rivals", "game runs")
    assert service.state == "ready", "the engine before is about to end"
    host.exit_gate.set()
    await until(lambda: host.state is EngineState.LOADING)
    await service.device.yield_device("rivals", "game runs")
    assert service.state == "loading"
    host.load_gate.set()
    await loading
    await service.device.yield_device("rivals", "game runs")
    assert (service.state, host.state) == ("yielding", EngineState.ASLEEP)


# Another model


async def test_a_load_during_the_drain_of_a_sleep_cuts_nothing_off(
    service: Service, host: ScriptedHost, other: Other
) -> None:
    heard = await running(service, host)
    sleep = asyncio.create_task(service.device.sleep())
    await until(lambda: host.is_sleeping)
    loading = load(service)
    await asyncio.sleep(0.01)
    assert host.swapped == []
    finish(host)
    await asyncio.gather(sleep, loading)
    assert isinstance(heard[-1], Done)
    assert service.served_model().name == "other"


async def test_an_engine_that_is_not_ready_is_not_replaced(service: Service, host: ScriptedHost, other: Other) -> None:
    host.state = EngineState.LOADING
    with pytest.raises(PageddError) as refused:
        await service.device.load_model("x", None, ADMIN)
    assert (refused.value.code, other.num_looks) == ("engine_loading", 0)


async def test_each_answer_names_the_model_that_computed_it(service: Service, host: ScriptedHost, other: Other) -> None:
    before = await running(service, host)
    loading = load(service)
    await until(lambda: host.is_sleeping)
    held = start(service, "held")
    finish(host)
    await loading
    await until(lambda: len(host.submitted) == 2)
    assert [request.model for request in (await service.stats_frame(blocks=False, viewer=ADMIN)).requests] == ["other"]
    finish(host, 1)
    assert [message.model for message in (before[-1], held[-1]) if isinstance(message, Done)] == ["bytes", "other"]
    assert host.submitted[1].prompt_token_ids == [77]


async def test_whoever_was_tokenized_for_the_model_before_is_told_to_come_again(
    service: Service, host: ScriptedHost, other: Other
) -> None:
    tokenized = asyncio.Event()

    async def slowly(message: object) -> list[int]:
        await tokenized.wait()
        return [97]

    service.served_model().prompt_token_ids = slowly  # type: ignore[method-assign]
    heard = start(service)
    await load(service)
    tokenized.set()
    await until(lambda: bool(heard))
    assert isinstance(heard[-1], Failed)
    assert (heard[-1].code, "another model" in heard[-1].message) == ("engine_loading", True)
    assert host.submitted == []


async def test_the_model_that_is_not_served_any_more_is_closed(
    service: Service, host: ScriptedHost, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    close = ServedModel.close
    monkeypatch.setattr(ServedModel, "close", lambda model: (closed.append(model.name), close(model)))
    await load(service)
    assert closed == ["bytes"]


async def test_a_model_that_cannot_be_loaded_is_closed(service: Service, host: ScriptedHost, other: Other) -> None:
    host.swap_failure = PageddError("no_kv_memory", "scripted")
    with pytest.raises(PageddError, match="scripted"):
        await load(service)
    assert (other.num_closed, service.served_model().name) == (1, "bytes")


async def test_closing_in_the_midst_of_a_load_closes_both_models(
    service: Service, host: ScriptedHost, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    close = ServedModel.close
    monkeypatch.setattr(ServedModel, "close", lambda model: (closed.append(model.name), close(model)))
    host.load_gate.clear()
    loading = load(service)
    await until(lambda: host.state is EngineState.LOADING)
    await service.close()
    assert (closed, other.num_closed) == (["bytes"], 1)
    with pytest.raises(asyncio.CancelledError):
        await loading


# Over engine processes


class Engine:
    """A service over a host with real processes, and what each engine was given: (its model, prompt ids)."""

    def __init__(self, folder: Path) -> None:
        self.host = EngineHost(folder / "e.sock", FAKE_ENGINE)
        self.service = Service(DaemonConfig(max_num_seqs=8, num_blocks=6), self.host)
        self.service.set_model(write_model(folder / "bytes"))
        self.submitted: list[tuple[str, list[int]]] = []
        submit = self.host.submit

        def record(request: object) -> None:
            assert self.host._config is not None
            submit(request)  # type: ignore[arg-type]
            self.submitted.append((self.host._config.model.partition(":")[0], request.prompt_token_ids))  # type: ignore[attr-defined]

        self.host.submit = record  # type: ignore[method-assign]

    async def start(self, model: str) -> None:
        await self.host.start()
        self.host.load(EngineConfig(model=model))
        await until(lambda: self.host.state is EngineState.READY)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    await engine.service.close()
    await engine.host.stop()


async def test_who_waited_while_another_model_failed_is_computed_by_the_one_that_he_was_tokenized_for(
    engine: Engine, tmp_path: Path
) -> None:
    await engine.start("ok")
    Other(tmp_path, engine.service, EngineConfig(model="error:no_kv_memory"))
    running: list[DaemonMessage] = []
    slow = Generate(id="slow", prompt_token_ids=[Prompt.SLOW % 259, 5], sampling=Sampling(max_tokens=200))
    engine.service.start([slow], ANA, running.append)
    await until(lambda: len(engine.submitted) == 1)
    loading = load(engine.service)
    await until(lambda: engine.host.is_sleeping)
    held = start(engine.service, "ab")
    with pytest.raises(PageddError, match="no_kv_memory"):
        await loading
    await until(lambda: has_ended(held))
    assert engine.submitted[1:] == [("ok", [97, 98])]
    assert isinstance(held[-1], Done)
    assert held[-1].model == "bytes"


async def test_who_wakes_an_engine_that_is_to_be_replaced_is_served_by_it_to_the_end(
    engine: Engine, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    await engine.start(f"until:{gate}")
    await engine.service.device.sleep()
    gate.unlink()
    Other(tmp_path, engine.service, EngineConfig(model="ok"))
    woke = start(engine.service, "ab", max_tokens=100)
    await until(lambda: engine.host.state is EngineState.LOADING)
    loading = load(engine.service)
    await asyncio.sleep(0.05)
    gate.touch()
    await loading
    after = start(engine.service, "cd")
    await until(lambda: has_ended(after))
    assert isinstance(woke[-1], Done), woke[-1]
    assert (woke[-1].model, len(woke[-1].choices[0].token_ids)) in (("bytes", 100), ("other", 100))
    assert engine.submitted[0] in (("until", [97, 98]), ("ok", [77]))
    assert engine.submitted[1] == ("ok", [77])


async def test_an_engine_process_that_wakes_is_put_to_sleep_when_it_has_woken(engine: Engine) -> None:
    await engine.start("ok")
    await engine.service.device.sleep()
    engine.service.device.wake()
    await engine.service.device.sleep()
    assert (engine.host.state, engine.host.pid) == (EngineState.ASLEEP, None)


async def test_whoever_waits_for_an_engine_that_falls_asleep_wakes_none_once_others_have_the_device(
    engine: Engine,
) -> None:
    await engine.start("ok")
    slow = Generate(id="slow", prompt_token_ids=[Prompt.SLOW % 259, 5], sampling=Sampling(max_tokens=200))
    engine.service.start([slow], ANA, lambda message: None)
    await until(lambda: len(engine.submitted) == 1)
    sleep = asyncio.create_task(engine.service.device.sleep())
    await until(lambda: engine.host.is_sleeping)
    held = start(engine.service)
    await asyncio.sleep(0.01)
    await engine.service.device.yield_device("rivals", "game runs")
    await sleep
    await until(lambda: has_ended(held))
    assert isinstance(held[-1], Failed)
    assert held[-1].code == "device_yielded"
    assert (engine.host.state, engine.host.pid) == (EngineState.ASLEEP, None)
