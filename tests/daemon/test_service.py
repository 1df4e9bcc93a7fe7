"""The use cases behind both APIs, with a scripted engine and no sockets."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pagedd.client.errors import PageddError
from pagedd.client.protocol import (
    Accepted,
    Chat,
    ChatMessage,
    DaemonMessage,
    Delta,
    Done,
    Failed,
    Generate,
    Sampling,
)
from pagedd.daemon.advice import LEAST_BUSY_S
from pagedd.daemon.caller import Caller
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.model_loading import Candidate
from pagedd.daemon.quota_config import QuotaConfig
from pagedd.daemon.requests import LiveRequest
from pagedd.daemon.served_model import ServedModel
from pagedd.daemon.service import Service
from pagedd.daemon.text.tokenizer import TextTokenizer
from pagedd.engine.config import EngineConfig

from .scripted import ScriptedHost, engine_info, engine_stats, until, write_model

ANA, BOB, ADMIN = Caller(uid=1001), Caller(uid=1002), Caller(uid=0)


@pytest.fixture
def host() -> ScriptedHost:
    return ScriptedHost(reply=lambda request: None)


@pytest.fixture
async def service(host: ScriptedHost, tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(DaemonConfig(), host)
    service.set_model(write_model(tmp_path))
    yield service
    await service.close()


def prompt(text: str = "ab", request_id: str = "a", **fields: object) -> Generate:
    return Generate(id=request_id, prompt=text, **fields)  # type: ignore[arg-type]


async def started(
    service: Service, host: ScriptedHost, *messages: Generate | Chat, caller: Caller = ANA
) -> list[DaemonMessage]:
    """Starts a request and waits until the engine has it; returns the list that its messages go to."""
    heard: list[DaemonMessage] = []
    before = len(host.submitted)
    service.start(messages or [prompt()], caller, heard.append)
    await until(lambda: len(host.submitted) > before or any(isinstance(message, Failed) for message in heard))
    return heard


async def test_a_request_is_accepted_streamed_and_done(service: Service, host: ScriptedHost) -> None:
    heard = await started(service, host)
    request_id = host.submitted[0].request_id
    host.produce(request_id, b"x")
    host.produce(request_id, b"y", finish_reason="length")
    assert heard[:3] == [
        Accepted(id="a", request_id=request_id),
        Delta(id="a", text="x", token_ids=[120]),
        Delta(id="a", text="y", token_ids=[121], finish_reason="length"),
    ]
    assert isinstance(heard[3], Done)
    assert not service.is_live(request_id)


async def test_one_bad_prompt_among_many_starts_none(service: Service, host: ScriptedHost) -> None:
    bad = Generate(id="1", prompt_token_ids=[999])
    heard = await started(service, host, prompt(request_id="0"), bad)
    assert [(message.id, type(message)) for message in heard] == [("0", Failed), ("1", Failed)]
    assert host.submitted == []


async def test_a_long_text_is_tokenized_beside_the_event_loop_and_a_short_one_in_it(
    service: Service, host: ScriptedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    encode = TextTokenizer.encode

    def recording(self: TextTokenizer, text: str, **options: bool) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(self, text, **options)

    monkeypatch.setattr(TextTokenizer, "encode", recording)
    await started(service, host, prompt("ab"))
    heard = await started(service, host, prompt("b" * 20_000))
    assert threads[0] == threading.main_thread().name
    assert threads[1].startswith("text")
    assert isinstance(heard[0], Failed)
    assert "prompt 20000" in heard[0].message


async def test_a_chat_goes_through_the_template_and_cannot_write_control_tokens(
    service: Service, host: ScriptedHost
) -> None:
    message = Chat(id="a", messages=[ChatMessage(role="user", content="<|im_end|>")])
    await started(service, host, message)
    ids = host.submitted[0].prompt_token_ids
    assert [token_id for token_id in ids if token_id > 255] == [257, 256, 257]


async def test_a_request_that_is_cancelled_while_it_is_tokenized_never_reaches_the_engine(
    service: Service, host: ScriptedHost
) -> None:
    heard: list[DaemonMessage] = []
    [request_id] = service.start([prompt()], ANA, heard.append)
    assert service.cancel(request_id)
    await asyncio.sleep(0.01)
    assert [type(message) for message in heard] == [Done]
    assert host.submitted == []


async def test_cancelling_what_is_not_there_says_so(service: Service) -> None:
    assert not service.cancel("nobody")
    assert not service.set_priority("nobody", 5, ADMIN)


async def test_a_priority_reaches_the_engine_and_is_checked(service: Service, host: ScriptedHost) -> None:
    await started(service, host)
    request_id = host.submitted[0].request_id
    assert service.set_priority(request_id, 7, ADMIN)
    assert host.priorities == [(request_id, 7)]
    with pytest.raises(PageddError) as refused:
        service.set_priority(request_id, 101, ADMIN)
    assert refused.value.field == "priority"


async def test_a_priority_that_changed_is_an_event_with_both_and_who_did_it(
    service: Service, host: ScriptedHost
) -> None:
    await started(service, host)
    request_id = host.submitted[0].request_id
    for priority in (7, 7, -20):
        service.set_priority(request_id, priority, ADMIN)
    told = [(event.reason, event.request_id) for event in service.events.newest() if event.kind == "priority"]
    assert told == [
        (f"from 0 to 7 by {ADMIN.name}", request_id),
        (f"from 7 to -20 by {ADMIN.name}", request_id),
    ]


async def test_a_frame_says_how_the_last_requests_ended(service: Service, host: ScriptedHost) -> None:
    for number in range(34):
        await started(service, host, prompt(str(number)))
    *early, stopped, refused, cancelled = [request.request_id for request in host.submitted]
    for request_id in early:
        service.cancel(request_id)
    host.produce(stopped, b"x", finish_reason="length")
    host.on_refused(refused, "out_of_memory", "no room")
    service.cancel(cancelled)
    endings = (await service.stats_frame(blocks=False)).endings
    assert len(endings) == 32, "the newest ones"
    assert [(ending.request_id, ending.outcome) for ending in endings[-3:]] == [
        (stopped, "length"),
        (refused, "out_of_memory"),
        (cancelled, "abort"),
    ]


async def test_what_the_engine_refuses_is_told_with_its_code(service: Service, host: ScriptedHost) -> None:
    heard = await started(service, host)
    host.on_refused(host.submitted[0].request_id, "out_of_memory", "no room")
    assert isinstance(heard[-1], Failed)
    assert (heard[-1].code, heard[-1].message) == ("out_of_memory", "no room")


async def test_when_the_engine_dies_its_requests_end_and_new_ones_are_refused(
    service: Service, host: ScriptedHost
) -> None:
    heard = await started(service, host)
    host.lose("the engine process was ended by SIGKILL")
    assert isinstance(heard[-1], Failed)
    assert (heard[-1].code, heard[-1].message) == ("engine_died", "the engine process was ended by SIGKILL")
    again = await started(service, host)
    assert isinstance(again[-1], Failed)
    assert again[-1].code == "engine_died"
    assert host.aborted == []


async def test_the_loss_of_an_engine_is_reported_with_what_it_had_in_flight_and_without_their_prompts(
    service: Service, host: ScriptedHost, state_home: Path
) -> None:
    host.trace = "in attention"
    await started(service, host)
    host.lose("the engine process (pid 7) was ended by SIGSEGV")
    (report,) = (state_home / "pagedd" / "crashes").iterdir()
    text = report.read_text()
    assert report.stat().st_mode & 0o777 == 0o600
    assert "(pid 7) was ended by SIGSEGV" in text
    assert host.submitted[0].request_id in text
    assert "in attention" in text
    assert str(host.submitted[0].prompt_token_ids) not in text


async def test_a_request_that_was_there_when_two_engines_died_is_refused_and_others_are_not(
    service: Service, host: ScriptedHost
) -> None:
    for _ in range(2):
        await started(service, host)
        host.lose()
        host.state, host.info = EngineState.READY, engine_info()
    again = await started(service, host)
    assert isinstance(again[-1], Failed)
    assert again[-1].code == "poison_request"
    other = await started(service, host, prompt("another prompt"))
    assert not isinstance(other[-1], Failed)


def next_engine(host: ScriptedHost) -> None:
    host.state, host.info, host.stats = EngineState.READY, engine_info(), engine_stats()


def prompts_of(host: ScriptedHost) -> list[bytes]:
    """Of what the engine has now, in order."""
    return [bytes(request.prompt_token_ids) for request in host.live.values()]


async def lost_with(service: Service, host: ScriptedHost, *texts: str) -> None:
    """An engine dies with these prompts in flight, and the next one comes."""
    for text in texts:
        await started(service, host, prompt(text))
    host.lose()
    next_engine(host)


async def test_the_engine_has_one_suspect_at_a_time_beside_all_others(service: Service, host: ScriptedHost) -> None:
    await lost_with(service, host, "one", "two", "three")
    heard: dict[str, list[DaemonMessage]] = {name: [] for name in ("one", "two", "new", "three")}
    ids = {name: service.start([prompt(name)], ANA, messages.append)[0] for name, messages in heard.items()}
    await until(lambda: prompts_of(host) == [b"one", b"new"])
    service.cancel(ids["two"])
    assert [type(message) for message in heard["two"]] == [Done]
    host.produce(ids["one"], b"x", finish_reason="length")
    await until(lambda: prompts_of(host) == [b"new", b"three"])
    host.produce(ids["three"], b"x", finish_reason="length")
    assert isinstance(heard["three"][-1], Done)
    await started(service, host, prompt("three"))
    await started(service, host, prompt("one"))
    assert prompts_of(host) == [b"new", b"three", b"one"], "who ran to its end is no suspect"


async def test_one_killer_bans_nobody_who_was_beside_it(service: Service, host: ScriptedHost) -> None:
    names = ["killer", *(f"innocent {number}" for number in range(3))]
    await lost_with(service, host, *names)
    heard: dict[str, list[DaemonMessage]] = {name: [] for name in names}
    for name, messages in heard.items():
        service.start([prompt(name)], ANA, messages.append)
    await until(lambda: prompts_of(host) == [b"killer"])
    host.lose()
    next_engine(host)
    refused = (await started(service, host, prompt("killer")))[-1]
    assert isinstance(refused, Failed)
    assert refused.code == "poison_request"
    for name in names[1:]:
        await until(lambda name=name: prompts_of(host) == [name.encode()])  # type: ignore[misc]
        host.produce(next(iter(host.live)), b"x", finish_reason="length")
        assert isinstance(heard[name][-1], Done)


async def test_one_callers_deaths_are_not_held_against_another(service: Service, host: ScriptedHost) -> None:
    for _ in range(2):
        await lost_with(service, host, "standing")
    assert isinstance((await started(service, host, prompt("standing"), caller=BOB))[0], Accepted)


async def test_a_suspect_that_waits_while_the_engine_falls_asleep_wakes_it(
    service: Service, host: ScriptedHost
) -> None:
    await lost_with(service, host, "one", "two")
    await started(service, host, prompt("one"))
    waiting: list[DaemonMessage] = []
    service.start([prompt("two")], ANA, waiting.append)
    await asyncio.sleep(0.01)
    host.begin_sleep()
    await host.sleep()
    await until(lambda: host.num_wakes == 1)
    assert waiting == []
    host.get_up()
    await until(lambda: prompts_of(host) == [b"two"])
    assert [type(message) for message in waiting] == [Accepted]


async def test_an_engine_that_ends_between_door_and_submission_is_a_refusal(
    service: Service, host: ScriptedHost
) -> None:
    heard: list[DaemonMessage] = []
    service.start([prompt()], ANA, heard.append)
    host.state = EngineState.RESTARTING
    await until(lambda: bool(heard))
    assert [type(message) for message in heard] == [Failed]
    assert heard[0].code == "engine_died"  # type: ignore[union-attr]


async def test_a_fault_in_one_request_ends_that_request_alone(service: Service, host: ScriptedHost) -> None:
    first = await started(service, host)
    second = await started(service, host)
    broken, whole = (request.request_id for request in host.submitted)
    host.produce(broken, b"x", index=5)  # no such choice
    host.produce(whole, b"y", finish_reason="length")
    assert isinstance(first[-1], Failed)
    assert first[-1].code == "internal"
    assert broken in first[-1].message
    assert isinstance(second[-1], Done)
    assert host.aborted == [(broken, None)]


async def test_a_fault_on_the_way_into_the_engine_ends_the_request(
    service: Service, host: ScriptedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LiveRequest, "open_texts", lambda request, tokenizer: 1 // 0)
    heard = await started(service, host)
    assert [message.code for message in heard if isinstance(message, Failed)] == ["internal"]
    assert list(service.live_entries()) == []


async def test_held_requests_count_for_the_quotas_from_when_the_engine_is_awake_and_those_that_left_do_not(
    host: ScriptedHost, tmp_path: Path
) -> None:
    service = Service(DaemonConfig(quota=QuotaConfig(max_requests=1, max_priority=0)), host)
    service.set_model(write_model(tmp_path))
    await service.device.sleep()
    heard: list[DaemonMessage] = []
    [gone] = service.start([prompt("gone")], ANA, lambda message: None)
    await until(lambda: host.num_wakes == 1)
    service.cancel(gone)
    service.start([prompt("first")], ANA, heard.append)
    service.start([prompt("second")], ANA, heard.append)
    service.start([prompt("urgent", priority=1)], ANA, heard.append)
    await until(lambda: host.num_wakes == 4)
    host.get_up()
    await until(lambda: len(heard) == 3)
    codes = [message.code if isinstance(message, Failed) else "" for message in heard]
    assert codes == ["", "over_quota", "exceeds_quota"]
    assert [request.prompt_token_ids for request in host.submitted] == [list(b"first")]
    await service.close()


async def test_the_queue_is_what_has_no_seat(tmp_path: Path, host: ScriptedHost) -> None:
    service = Service(DaemonConfig(max_num_seqs=2, max_queued_requests=1), host)
    service.set_model(write_model(tmp_path))
    await started(service, host, prompt(sampling=Sampling(n=2)))
    await started(service, host)
    heard = await started(service, host)
    assert isinstance(heard[0], Failed)
    assert heard[0].code == "queue_full"
    assert "1 wait and 1 came, limit 1" in heard[0].message
    host.produce(host.submitted[1].request_id, b"x", finish_reason="length")
    assert isinstance((await started(service, host))[0], Accepted)
    await service.close()


async def test_whoever_must_come_back_is_told_how_long_the_first_has_waited(
    service: Service, host: ScriptedHost
) -> None:
    assert service.retry_after_s == 1
    host.stats = engine_stats(oldest_wait_s=4.2)
    assert service.retry_after_s == 5
    host.stats = engine_stats(oldest_wait_s=4000.0)
    assert service.retry_after_s == 60


async def test_prompts_are_shared_with_oneself_and_a_salt_narrows_it(service: Service, host: ScriptedHost) -> None:
    for caller, salt in ((ANA, None), (BOB, None), (ANA, "s"), (BOB, "s")):
        await started(service, host, prompt(cache_salt=salt), caller=caller)
    assert [request.cache_extras for request in host.submitted] == [
        (("caller", "uid:1001"),),
        (("caller", "uid:1002"),),
        (("caller", "uid:1001"), ("salt", "s")),
        (("caller", "uid:1002"), ("salt", "s")),
    ]


async def test_draining_takes_no_more_and_ends_with_the_last_request(service: Service, host: ScriptedHost) -> None:
    await started(service, host)
    service.begin_drain()
    refused = await started(service, host)
    assert isinstance(refused[0], Failed)
    assert refused[0].code == "shutting_down"
    drained = asyncio.create_task(service.drained())
    await asyncio.sleep(0)
    assert not drained.done()
    host.produce(host.submitted[0].request_id, b"x", finish_reason="length")
    await asyncio.wait_for(drained, 1)


async def test_a_request_wakes_a_sleeping_engine_and_waits_for_it(service: Service, host: ScriptedHost) -> None:
    await service.device.sleep()
    assert service.state == "asleep"
    heard: list[DaemonMessage] = []
    service.start([prompt()], ANA, heard.append)
    await until(lambda: host.num_wakes == 1)
    assert (heard, host.submitted) == ([], [])
    host.get_up()
    await until(lambda: len(host.submitted) == 1)
    assert [type(message) for message in heard] == [Accepted]


async def test_a_request_that_waits_for_the_engine_to_wake_can_be_given_up(
    service: Service, host: ScriptedHost
) -> None:
    await service.device.sleep()
    heard: list[DaemonMessage] = []
    [request_id] = service.start([prompt()], ANA, heard.append)
    assert service.cancel(request_id)
    assert [type(message) for message in heard] == [Done]
    host.get_up()
    await started(service, host, prompt("other"))
    assert [request.prompt_token_ids for request in host.submitted] == [list(b"other")]


async def test_an_engine_that_does_not_wake_is_said_to_whoever_waits(service: Service, host: ScriptedHost) -> None:
    await service.device.sleep()
    heard: list[DaemonMessage] = []
    service.start([prompt()], ANA, heard.append)
    host.state, host.is_sleeping = EngineState.FAILED, False
    await until(lambda: bool(heard))
    assert isinstance(heard[0], Failed)
    assert heard[0].code == "engine_failed"


async def test_what_runs_may_end_before_the_engine_sleeps(service: Service, host: ScriptedHost) -> None:
    heard = await started(service, host)
    sleep = asyncio.create_task(service.device.sleep())
    await asyncio.sleep(0)
    assert not sleep.done()
    host.produce(host.submitted[0].request_id, b"x", finish_reason="length")
    await asyncio.wait_for(sleep, 1)
    assert isinstance(heard[-1], Done)


async def test_what_does_not_end_in_time_is_told_so(host: ScriptedHost, tmp_path: Path) -> None:
    service = Service(DaemonConfig(drain_seconds=0.01), host)
    service.set_model(write_model(tmp_path))
    heard = await started(service, host)
    await service.device.sleep()
    assert isinstance(heard[-1], Failed)
    assert heard[-1].code == "engine_asleep"
    await service.close()


@pytest.fixture
def other_model(service: Service, tmp_path: Path) -> str:
    """The name of a model that `service` can load."""
    folder = write_model(tmp_path / "other", name="other")

    async def find_model(name: str, served_name: str | None) -> Candidate:
        return Candidate(ServedModel(folder, served_name), EngineConfig(model=name))

    service.device.find_model = find_model
    return "other"


async def test_another_model_waits_until_what_runs_has_ended_and_what_comes_waits_for_it(
    service: Service, host: ScriptedHost, other_model: str
) -> None:
    heard = await started(service, host)
    loading = asyncio.create_task(service.device.load_model(other_model, None, ADMIN))
    await until(lambda: host.is_sleeping)
    any_model, by_old_name = [], []
    service.start([prompt()], ANA, any_model.append)
    service.start([prompt(model="bytes")], ANA, by_old_name.append)
    host.produce(host.submitted[0].request_id, b"x", finish_reason="length")
    await loading
    assert isinstance(heard[-1], Done)
    assert (service.served_model().name, [config.model for config in host.swapped]) == ("other", ["other"])
    await until(lambda: bool(any_model and by_old_name))
    assert isinstance(any_model[0], Accepted)
    assert isinstance(by_old_name[0], Failed)
    assert (by_old_name[0].code, "'other'" in by_old_name[0].message) == ("model_not_found", True)


async def test_a_model_that_does_not_load_leaves_the_one_before(
    service: Service, host: ScriptedHost, other_model: str
) -> None:
    host.swap_failure = PageddError("no_kv_memory", "scripted")
    with pytest.raises(PageddError, match="scripted"):
        await service.device.load_model(other_model, None, ADMIN)
    assert service.served_model().name == "bytes"
    assert isinstance((await started(service, host, prompt(model="bytes")))[0], Accepted)
    [event] = [event for event in service.events.newest() if "could not" in event.reason]
    assert event.reason == "another could not be loaded (no_kv_memory); bytes is served"


async def test_a_load_goes_on_when_whoever_asked_has_gone_and_admits_no_second(
    service: Service, host: ScriptedHost, other_model: str
) -> None:
    await started(service, host)
    asked = asyncio.create_task(service.device.load_model(other_model, "mine", ADMIN))
    await until(lambda: host.is_sleeping)
    asked.cancel()
    for again in (service.device.load_model(other_model, None, ADMIN), service.device.sleep()):
        with pytest.raises(PageddError) as refused:
            await again
        assert refused.value.code == "engine_loading"
    host.produce(host.submitted[0].request_id, b"x", finish_reason="length")
    await until(lambda: service.served_model().name == "mine")


async def test_what_does_not_end_before_the_next_model_is_told_so(
    host: ScriptedHost, service: Service, other_model: str
) -> None:
    service.device._config = DaemonConfig(drain_seconds=0.01)
    heard = await started(service, host)
    await service.device.load_model(other_model, None, ADMIN)
    assert isinstance(heard[-1], Failed)
    assert heard[-1].code == "engine_loading"


@pytest.mark.parametrize("name", ["", "a" * 5000, "a\0b"])
async def test_a_name_that_no_model_has_is_refused(service: Service, name: str) -> None:
    with pytest.raises(PageddError) as refused:
        await service.device.load_model(name, None, ADMIN)
    assert (refused.value.code, refused.value.field) == ("invalid_value", "model")


async def test_while_others_need_the_device_no_request_wakes_the_engine(service: Service, host: ScriptedHost) -> None:
    heard = await started(service, host)
    yielding = asyncio.create_task(service.device.yield_device("rivals", "game runs"))
    await until(lambda: host.is_sleeping)
    refused = await started(service, host)
    assert isinstance(refused[0], Failed)
    assert (refused[0].code, "game runs" in refused[0].message) == ("device_yielded", True)
    host.produce(host.submitted[0].request_id, b"x", finish_reason="length")
    await yielding
    assert isinstance(heard[-1], Done)
    assert (service.state, service.describe()) == ("yielding", "yielding: game runs")
    with pytest.raises(PageddError, match="device_yielded"):
        service.device.wake()
    with pytest.raises(PageddError, match="device_yielded"):
        await service.device.load_model("other", None, ADMIN)
    await service.device.yield_device("rivals", "game runs")
    assert host.num_wakes == 0
    await service.device.yield_device("rivals", None)
    assert (host.num_wakes, service.state) == (1, "loading")
    reasons = [event.reason for event in service.events.newest() if event.kind == "engine"]
    assert [reason for reason in reasons if "device" in reason] == [
        "the device is left to others: game runs",
        "sleeps: others have the device",
        "the device is taken back",
    ]


async def test_the_device_is_taken_back_when_nobody_needs_it_any_more(service: Service, host: ScriptedHost) -> None:
    await service.device.yield_device("rivals", "game runs")
    await service.device.yield_device("suspend", "the machine is suspended")
    assert service.describe() == "yielding: game runs, the machine is suspended"
    await service.device.yield_device("rivals", None)
    assert host.num_wakes == 0
    await service.device.yield_device("suspend", None)
    assert host.num_wakes == 1


async def test_a_suspend_waits_for_requests_no_longer_than_it_may(service: Service, host: ScriptedHost) -> None:
    heard = await started(service, host)
    await service.device.yield_device("suspend", "the machine is suspended", within_s=0.01)
    assert isinstance(heard[-1], Failed)
    assert heard[-1].code == "device_yielded"


async def test_an_engine_that_slept_before_sleeps_afterwards(service: Service, host: ScriptedHost) -> None:
    await service.device.sleep()
    await service.device.yield_device("rivals", "game runs")
    assert service.state == "yielding"
    await service.device.yield_device("rivals", None)
    assert (host.num_wakes, service.state) == (0, "asleep")


async def test_an_engine_that_loads_is_left_to_it(service: Service, host: ScriptedHost) -> None:
    host.state = EngineState.LOADING
    await service.device.yield_device("rivals", "game runs")
    assert (service.state, host.is_sleeping) == ("loading", False)
    host.state = EngineState.READY
    await service.device.yield_device("rivals", "game runs")
    assert host.state is EngineState.ASLEEP


async def test_a_request_that_waited_for_the_engine_hears_that_others_need_the_device(
    service: Service, host: ScriptedHost
) -> None:
    await started(service, host)
    sleep = asyncio.create_task(service.device.sleep())
    await until(lambda: host.is_sleeping)
    heard: list[DaemonMessage] = []
    service.start([prompt("held")], ANA, heard.append)
    yielding = asyncio.create_task(service.device.yield_device("rivals", "game runs"))
    await until(lambda: service.state == "yielding")
    host.produce(host.submitted[0].request_id, b"x", finish_reason="length")
    await asyncio.gather(sleep, yielding)
    await until(lambda: bool(heard))
    assert isinstance(heard[0], Failed)
    assert heard[0].code == "device_yielded"


async def test_a_busy_engine_is_not_idle_however_long_it_takes(service: Service, host: ScriptedHost) -> None:
    await started(service, host)
    assert service.idle_s == 0
    host.produce(host.submitted[0].request_id, b"x", finish_reason="length")
    await asyncio.sleep(0.01)
    assert service.idle_s > 0
    await service.device.sleep()
    assert service.idle_s == 0


async def test_an_idle_service_has_drained_at_once(service: Service) -> None:
    service.begin_drain()
    await asyncio.wait_for(service.drained(), 1)


async def test_closing_ends_every_request_with_its_terminal_message(service: Service, host: ScriptedHost) -> None:
    running = await started(service, host)
    admitting: list[DaemonMessage] = []
    service.start([prompt("b" * 5000)], ANA, admitting.append)
    await service.close()
    for heard in (running, admitting):
        assert isinstance(heard[-1], Failed)
        assert heard[-1].code == "shutting_down"
    await asyncio.wait_for(service.drained(), 1)


async def test_a_frame_shows_who_asks_and_what_the_engine_does(service: Service, host: ScriptedHost) -> None:
    await started(service, host, prompt(priority=3))
    frame = await service.stats_frame(blocks=True)
    assert (frame.state, frame.model, frame.device) == ("ready", "bytes", "cpu scripted")
    [row] = frame.requests
    assert (row.request_id, row.user, row.priority, row.num_blocks, row.block_table) == (
        host.submitted[0].request_id,
        "1001",
        3,
        2,
        [7, 8],
    )
    assert frame.blocks is not None
    assert frame.blocks.states == bytes(256)
    assert frame.figures["kv_usage"] == 0.0
    assert frame.figures["slot_fill"] is None
    without = await service.stats_frame(blocks=False)
    assert without.blocks is None
    assert without.requests[0].block_table == []
    assert without.requests[0].num_blocks == 2


async def test_a_frame_without_an_engine_says_so_and_has_no_figures(service: Service, host: ScriptedHost) -> None:
    host.lose()
    frame = await service.stats_frame(blocks=True)
    assert (frame.figures.pop("observed_seconds"), frame.figures.pop("observed_seconds_wanted")) == (0, LEAST_BUSY_S)
    assert (frame.state, set(frame.figures.values()), frame.requests, frame.blocks) == ("restarting", {None}, [], None)


async def test_before_the_model_is_there_nothing_can_be_asked(host: ScriptedHost) -> None:
    host.state, host.detail, host.progress = EngineState.LOADING, "weights", 0.43
    service = Service(DaemonConfig(), host)
    with pytest.raises(PageddError, match="loading, 43 % \\(weights\\)"):
        service.check_open()
    host.state = EngineState.READY
    with pytest.raises(PageddError) as refused:
        service.check_open()
    assert refused.value.code == "engine_loading"


async def test_the_served_name_may_be_configured(host: ScriptedHost, tmp_path: Path) -> None:
    service = Service(DaemonConfig(served_model_name="mine"), host)
    service.set_model(write_model(tmp_path))
    assert isinstance((await started(service, host, prompt(model="mine")))[0], Accepted)
    refused = (await started(service, host, prompt(model="bytes")))[0]
    assert isinstance(refused, Failed)
    assert refused.code == "model_not_found"
    await service.close()


async def test_text_and_ids_turn_into_each_other(service: Service) -> None:
    assert await service.tokenize(prompt("hé")) == [104, 195, 169]
    assert service.detokenize([104, 256]) == "h<|im_end|>"
    with pytest.raises(PageddError) as refused:
        service.detokenize([259])
    assert (refused.value.code, refused.value.field) == ("token_out_of_vocabulary", "tokens")
