"""Questions about text: what they answer, and that they are bounded like requests, with an engine and without."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, ChatMessage, Done
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.quota_config import QuotaConfig
from pagedd.daemon.service import Service

from .asking import ANA, BOB, prompt, start
from .byte_model import CONTEXT, write_model
from .scripted_host import ScriptedHost
from .waiting import until

LONG = [65] * CONTEXT  # so many go to a thread


async def refusal(question: Any) -> tuple[str, str | None]:
    with pytest.raises(PageddError) as refused:
        await question
    return refused.value.code, refused.value.field


@pytest.fixture(params=[True, False], ids=["with an engine", "without"])
def has_engine(request: pytest.FixtureRequest, host: ScriptedHost) -> bool:
    if not request.param:
        host.state, host.info, host.stats = EngineState.ASLEEP, None, None
    return bool(request.param)


@pytest.mark.usefixtures("has_engine")
async def test_text_and_ids_turn_into_each_other(service: Service) -> None:
    assert await service.text.tokenize(prompt("h\u00e9"), ANA) == [104, 195, 169]
    assert await service.text.detokenize([104, 256], ANA) == "h<|im_end|>"
    assert await service.text.detokenize(LONG, ANA) == "A" * CONTEXT
    assert await refusal(service.text.detokenize([259], ANA)) == ("token_out_of_vocabulary", "tokens")


@pytest.mark.usefixtures("has_engine")
async def test_what_no_request_could_hold_is_no_question_either(service: Service) -> None:
    assert await refusal(service.text.detokenize([*LONG, 65], ANA)) == ("invalid_value", "tokens")
    assert await refusal(service.text.tokenize(prompt("a" * 30_000), ANA)) == ("prompt_too_long", "prompt")
    many = Chat(id="0", messages=[ChatMessage(role="user", content="x")] * 16_385)
    assert await refusal(service.text.tokenize(many, ANA)) == ("invalid_value", "messages")


async def test_the_configured_length_of_the_context_bounds_them(host: ScriptedHost, tmp_path: Path) -> None:
    service = Service(DaemonConfig(max_model_len=4), host)
    service.set_model(write_model(tmp_path))
    assert await service.text.detokenize([65] * 4, ANA) == "AAAA"
    assert await refusal(service.text.detokenize([65] * 5, ANA)) == ("invalid_value", "tokens")
    await service.close()


@pytest.mark.usefixtures("has_engine")
async def test_each_is_a_request_in_flight_of_its_caller(host: ScriptedHost, tmp_path: Path) -> None:
    service = Service(DaemonConfig(quota=QuotaConfig(max_requests=1)), host)
    service.set_model(write_model(tmp_path))
    first = asyncio.create_task(service.text.detokenize(LONG, ANA))
    await asyncio.sleep(0)
    assert await refusal(service.text.detokenize([65], ANA)) == ("over_quota", None)
    assert await refusal(service.text.tokenize(prompt("a"), ANA)) == ("over_quota", None)
    assert await service.text.detokenize([65], BOB) == "A"
    assert len(await first) == CONTEXT
    assert await service.text.tokenize(prompt("a"), ANA) == [97]
    await service.close()


async def test_they_wait_in_the_queue_of_requests(host: ScriptedHost, tmp_path: Path) -> None:
    service = Service(DaemonConfig(max_num_seqs=1, max_queued_requests=1), host)
    service.set_model(write_model(tmp_path))
    heard = start(service, prompt("a"))
    await until(lambda: bool(host.submitted))
    waiting = asyncio.create_task(service.text.detokenize(LONG, BOB))
    await asyncio.sleep(0)
    assert await refusal(service.text.detokenize([65], ANA)) == ("queue_full", None)
    await waiting
    assert await service.text.detokenize([65], ANA) == "A"
    host.produce(host.submitted[0].request_id, b"x", finish_reason="length")
    assert isinstance(heard[-1], Done)
    await service.close()


async def test_a_question_whose_caller_leaves_is_over(host: ScriptedHost, tmp_path: Path) -> None:
    service = Service(DaemonConfig(quota=QuotaConfig(max_requests=1)), host)
    service.set_model(write_model(tmp_path))
    left = asyncio.create_task(service.text.detokenize(LONG, ANA))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait({left})
    assert await service.text.detokenize([65], ANA) == "A"
    await service.close()
