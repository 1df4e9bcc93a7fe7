"""Another model in place of the served one: what runs, what waits and who is told, over a scripted host."""

import asyncio
from pathlib import Path

import pytest

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Accepted, Done, Failed
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.served_model import ServedModel
from pagedd.daemon.service import Service

from .asking import ADMIN, ANA, finish, prompt, start, started
from .byte_model import write_model
from .other_model import OtherModel, load
from .scripted_host import ScriptedHost
from .waiting import until


async def test_another_model_waits_until_what_runs_has_ended_and_what_comes_waits_for_it(
    service: Service, host: ScriptedHost, other: OtherModel
) -> None:
    heard = await started(service, host)
    loading = load(service)
    await until(lambda: host.is_sleeping)
    any_model, by_old_name = [], []
    service.start([prompt()], ANA, any_model.append)
    service.start([prompt(model="bytes")], ANA, by_old_name.append)
    finish(host)
    await loading
    assert isinstance(heard[-1], Done)
    assert (service.served_model().name, [config.model for config in host.swapped]) == ("other", ["other"])
    await until(lambda: len(any_model) > 1 and len(by_old_name) > 1)
    assert isinstance(any_model[1], Accepted)
    assert isinstance(by_old_name[1], Failed)
    assert (by_old_name[1].code, "'other'" in by_old_name[1].message) == ("model_not_found", True)


async def test_a_model_that_does_not_load_is_closed_and_leaves_the_one_before(
    service: Service, host: ScriptedHost, other: OtherModel, closed: list[str]
) -> None:
    host.swap_failure = PageddError("no_kv_memory", "scripted")
    with pytest.raises(PageddError, match="scripted"):
        await load(service)
    assert (closed, service.served_model().name) == (["other"], "bytes")
    assert isinstance((await started(service, host, prompt(model="bytes")))[0], Accepted)
    [event] = [event for event in service.events.newest() if "could not" in event.reason]
    assert event.reason == "another could not be loaded (no_kv_memory); bytes is served"


async def test_a_load_goes_on_when_whoever_asked_has_gone_and_admits_no_second(
    service: Service, host: ScriptedHost, other: OtherModel
) -> None:
    await started(service, host)
    asked = load(service, served_name="mine")
    await until(lambda: host.is_sleeping)
    asked.cancel()
    for again in (service.device.load_model("other", None, ADMIN), service.device.sleep()):
        with pytest.raises(PageddError) as refused:
            await again
        assert refused.value.code == "engine_loading"
    finish(host)
    await until(lambda: service.served_model().name == "mine")


async def test_a_look_that_does_not_end_is_given_up_for_the_next_model(
    service: Service, host: ScriptedHost, other: OtherModel
) -> None:
    other.gate.clear()
    hanging = []
    for number, name in enumerate(["pipe", "share"], 1):
        hanging.append(load(service, name))
        await until(lambda number=number: other.num_looks == number)  # type: ignore[misc]
    with pytest.raises(PageddError, match="or load another in its place"):
        await service.device.sleep()
    last = load(service, served_name="mine")
    for order in hanging:
        with pytest.raises(PageddError, match="engine_loading: another model was asked for meanwhile"):
            await order
    other.gate.set()
    await last
    assert (service.served_model().name, other.num_looks, len(host.swapped)) == ("mine", 3, 1)
    await service.device.sleep()


async def test_what_does_not_end_before_the_next_model_is_told_so(
    host: ScriptedHost, service: Service, other: OtherModel
) -> None:
    service.device._config = DaemonConfig(drain_seconds=0.01)
    heard = await started(service, host)
    await load(service)
    assert isinstance(heard[-1], Failed)
    assert heard[-1].code == "engine_loading"


@pytest.mark.parametrize("name", ["", "a" * 257, "a\nb", "\x1b[2J", "\u202eb"])
async def test_a_served_name_that_could_not_stand_in_a_log_is_refused(service: Service, name: str) -> None:
    with pytest.raises(PageddError) as refused:
        await service.device.load_model("other", name, ADMIN)
    assert (refused.value.code, refused.value.field) == ("invalid_value", "served_name")
    with pytest.raises(PageddError, match="it is 1 to 256 printable characters") as refused:
        DaemonConfig(served_model_name=name)
    assert refused.value.field == "served_model_name"


async def test_a_name_that_comes_from_a_file_is_shown_without_what_would_steer_a_terminal(tmp_path: Path) -> None:
    model = ServedModel(write_model(tmp_path, name="a\x1b[2Jb"), None)
    assert model.name == "a?[2Jb"
    model.close()


@pytest.mark.parametrize("name", ["", "a" * 5000, "a\0b"])
async def test_a_name_that_no_model_has_is_refused(service: Service, name: str) -> None:
    with pytest.raises(PageddError) as refused:
        await service.device.load_model(name, None, ADMIN)
    assert (refused.value.code, refused.value.field) == ("invalid_value", "model")


async def test_a_load_during_the_drain_of_a_sleep_cuts_nothing_off(
    service: Service, host: ScriptedHost, other: OtherModel
) -> None:
    heard = await started(service, host)
    sleep = asyncio.create_task(service.device.sleep())
    await until(lambda: host.is_sleeping)
    loading = load(service)
    await asyncio.sleep(0.01)
    assert host.swapped == []
    finish(host)
    await asyncio.gather(sleep, loading)
    assert isinstance(heard[-1], Done)
    assert service.served_model().name == "other"


async def test_an_engine_that_is_not_ready_is_not_replaced(
    service: Service, host: ScriptedHost, other: OtherModel
) -> None:
    host.state = EngineState.LOADING
    with pytest.raises(PageddError) as refused:
        await service.device.load_model("x", None, ADMIN)
    assert (refused.value.code, other.num_looks) == ("engine_loading", 0)


async def test_each_answer_names_the_model_that_computed_it(
    service: Service, host: ScriptedHost, other: OtherModel
) -> None:
    before = await started(service, host)
    loading = load(service)
    await until(lambda: host.is_sleeping)
    held = start(service, prompt("held"))
    finish(host)
    await loading
    await until(lambda: len(host.submitted) == 2)
    assert [request.model for request in (await service.stats_frame(blocks=False, viewer=ADMIN)).requests] == ["other"]
    finish(host, 1)
    assert [message.model for message in (before[-1], held[-1]) if isinstance(message, Done)] == ["bytes", "other"]
    assert host.submitted[1].prompt_token_ids == [77]


async def test_whoever_was_tokenized_for_the_model_before_is_told_to_come_again(
    service: Service, host: ScriptedHost, other: OtherModel
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
    service: Service, host: ScriptedHost, other: OtherModel, closed: list[str]
) -> None:
    await load(service)
    assert closed == ["bytes"]


async def test_closing_in_the_midst_of_a_load_closes_both_models(
    service: Service, host: ScriptedHost, other: OtherModel, closed: list[str]
) -> None:
    host.load_gate.clear()
    loading = load(service)
    await until(lambda: host.state is EngineState.LOADING)
    await service.close()
    assert sorted(closed) == ["bytes", "other"]
    with pytest.raises(asyncio.CancelledError):
        await loading
