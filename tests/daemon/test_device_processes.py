"""Sleep, yield and load in each other's way, over real engine processes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Done, Failed, Generate, Sampling
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.engine_host import EngineHost
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.service import Service
from pagedd.engine.config import EngineConfig

from .asking import has_ended, prompt, start
from .byte_model import write_model
from .fake_engine import Prompt
from .other_model import OtherModel, load
from .recorded_host import FAKE_ENGINE
from .waiting import until

SLOW = Generate(id="slow", prompt_token_ids=[Prompt.SLOW % 259, 5], sampling=Sampling(max_tokens=200))


def short(text: str, max_tokens: int = 3) -> Generate:
    return prompt(text, sampling=Sampling(max_tokens=max_tokens))


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
    OtherModel(tmp_path, engine.service, EngineConfig(model="error:no_kv_memory"))
    start(engine.service, SLOW)
    await until(lambda: len(engine.submitted) == 1)
    loading = load(engine.service)
    await until(lambda: engine.host.is_sleeping)
    held = start(engine.service, short("ab"))
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
    OtherModel(tmp_path, engine.service, EngineConfig(model="ok"))
    woke = start(engine.service, short("ab", max_tokens=100))
    await until(lambda: engine.host.state is EngineState.LOADING)
    loading = load(engine.service)
    await asyncio.sleep(0.05)
    gate.touch()
    await loading
    after = start(engine.service, short("cd"))
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
    start(engine.service, SLOW)
    await until(lambda: len(engine.submitted) == 1)
    sleep = asyncio.create_task(engine.service.device.sleep())
    await until(lambda: engine.host.is_sleeping)
    held = start(engine.service, short("ab"))
    await asyncio.sleep(0.01)
    await engine.service.device.yield_device("rivals", "game runs")
    await sleep
    await until(lambda: has_ended(held))
    assert isinstance(held[-1], Failed)
    assert held[-1].code == "device_yielded"
    assert (engine.host.state, engine.host.pid) == (EngineState.ASLEEP, None)
