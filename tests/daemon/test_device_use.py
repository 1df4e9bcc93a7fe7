"""When the engine sleeps, and for whom it leaves the device: over a scripted host."""

import asyncio
from pathlib import Path

import pytest

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Accepted, DaemonMessage, Done, Failed, Waking
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.quota_config import QuotaConfig
from pagedd.daemon.service import Service

from .asking import ADMIN, ANA, finish, prompt, start, started
from .byte_model import write_model
from .other_model import OtherModel, load
from .scripted_host import ScriptedHost
from .waiting import until

# Sleep


async def test_a_request_wakes_a_sleeping_engine_and_waits_for_it(service: Service, host: ScriptedHost) -> None:
    await service.device.sleep()
    assert service.state == "asleep"
    heard = start(service)
    await until(lambda: host.num_wakes == 1)
    assert ([type(message) for message in heard], host.submitted) == ([Waking], [])
    host.get_up()
    await until(lambda: len(host.submitted) == 1)
    assert [type(message) for message in heard] == [Waking, Accepted]


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
    heard = start(service)
    host.state, host.is_sleeping = EngineState.FAILED, False
    await until(lambda: len(heard) == 2)
    assert isinstance(heard[1], Failed)
    assert heard[1].code == "engine_failed"


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
    await until(lambda: len(heard) == 6)
    assert [type(message) for message in heard[:4]] == [Waking, Waking, Waking, Accepted]
    assert [message.code for message in heard[4:] if isinstance(message, Failed)] == ["over_quota", "exceeds_quota"]
    assert [request.prompt_token_ids for request in host.submitted] == [list(b"first")]
    await service.close()


async def test_what_runs_may_end_before_the_engine_sleeps(service: Service, host: ScriptedHost) -> None:
    heard = await started(service, host)
    sleep = asyncio.create_task(service.device.sleep())
    await asyncio.sleep(0)
    assert not sleep.done()
    finish(host)
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


async def test_a_busy_engine_is_not_idle_however_long_it_takes(service: Service, host: ScriptedHost) -> None:
    await started(service, host)
    assert service.idle_s == 0
    finish(host)
    await asyncio.sleep(0.01)
    assert service.idle_s > 0
    await service.device.sleep()
    assert service.idle_s == 0


async def test_a_second_sleep_returns_no_earlier_than_the_first(service: Service, host: ScriptedHost) -> None:
    await started(service, host)
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
    service: Service, host: ScriptedHost, other: OtherModel
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


async def test_while_others_need_the_device_no_request_wakes_the_engine(service: Service, host: ScriptedHost) -> None:
    heard = await started(service, host)
    yielding = asyncio.create_task(service.device.yield_device("rivals", "game runs"))
    await until(lambda: host.is_sleeping)
    refused = await started(service, host)
    assert isinstance(refused[0], Failed)
    assert (refused[0].code, "game runs" in refused[0].message) == ("device_yielded", True)
    finish(host)
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
    heard = start(service, prompt("held"))
    yielding = asyncio.create_task(service.device.yield_device("rivals", "game runs"))
    await until(lambda: service.state == "yielding")
    finish(host)
    await asyncio.gather(sleep, yielding)
    await until(lambda: len(heard) == 2)
    assert isinstance(heard[1], Failed)
    assert heard[1].code == "device_yielded"


async def test_a_load_that_still_looks_at_its_model_yields_the_device_and_is_given_up(
    service: Service, host: ScriptedHost, other: OtherModel, closed: list[str]
) -> None:
    other.gate.clear()
    loading = load(service)
    await asyncio.sleep(0)
    await service.device.yield_device("rivals", "game runs")
    assert (service.state, host.state) == ("yielding", EngineState.ASLEEP)
    other.gate.set()
    with pytest.raises(PageddError, match="device_yielded"):
        await loading
    assert (host.swapped, service.served_model().name, closed) == ([], "bytes", ["other"])
    await service.device.yield_device("rivals", None)
    assert host.num_wakes == 1


async def test_a_load_that_waits_for_running_requests_yields_the_device_and_is_given_up(
    service: Service, host: ScriptedHost, other: OtherModel
) -> None:
    await started(service, host)
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
    service: Service, host: ScriptedHost, other: OtherModel
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
