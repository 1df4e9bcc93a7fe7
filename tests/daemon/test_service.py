"""The use cases behind both APIs, with a scripted engine and no sockets."""

import asyncio
import threading
from pathlib import Path

import pytest

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Accepted, Chat, ChatMessage, DaemonMessage, Delta, Done, Failed, Generate, Sampling
from pagedd.daemon.advice import LEAST_BUSY_S
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.requests import LiveRequest
from pagedd.daemon.service import Service
from pagedd.daemon.text.tokenizer import TextTokenizer

from .asking import ADMIN, ANA, BOB, prompt, started
from .byte_model import write_model
from .scripted_host import ScriptedHost, engine_info, engine_stats
from .waiting import until


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
