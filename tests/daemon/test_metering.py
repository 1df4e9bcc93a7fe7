"""Quotas as clients meet them, over both APIs, with a scripted engine: refusals, what is given back, what is told.

The scripted tokenizer makes a token of each byte, so the prompt "abcd" has four.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedd.client.protocol import Chat, ChatMessage, DaemonMessage, Failed, Generate, Sampling
from pagedd.client.questions import GetUsage, UsageReport
from pagedd.daemon.caller import Caller
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.cost_config import CostConfig
from pagedd.daemon.metering_metrics import MeteringCollector
from pagedd.daemon.quota_config import QuotaConfig, QuotaLimits
from pagedd.daemon.service import Service

from .byte_model import write_model
from .scripted_host import ScriptedHost, engine_stats
from .served import serving
from .waiting import until

ANA, BOB = Caller(uid=1001), Caller(uid=1002)


class Front:
    """A service with a clock that only the test moves, and what its clients heard."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.now_s = 0.0
        self.host = ScriptedHost(reply=lambda request: None)
        self.service = Service(DaemonConfig(**settings), self.host, clock=lambda: self.now_s)
        self.service.set_model(write_model(folder))

    async def ask(self, *messages: Generate | Chat, caller: Caller = ANA) -> list[DaemonMessage]:
        heard: list[DaemonMessage] = []
        self.service.start(messages, caller, heard.append)
        await until(lambda: len(heard) >= len(messages))
        return heard

    async def refused(self, *messages: Generate | Chat, caller: Caller = ANA) -> Failed:
        heard = await self.ask(*messages, caller=caller)
        assert all(isinstance(message, Failed) for message in heard), heard
        assert isinstance(heard[0], Failed)
        return heard[0]

    async def taken(self, *messages: Generate | Chat, caller: Caller = ANA) -> str:
        """Its id at the engine."""
        before = len(self.host.submitted)
        heard = await self.ask(*messages, caller=caller)
        assert len(self.host.submitted) == before + len(messages), heard
        return self.host.submitted[-1].request_id

    def left(self, caller: Caller = ANA) -> float | None:
        return self.service.metering.accounts.of(caller).allowance.tokens_left


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    """Sixty tokens a minute, three requests in flight; a tenth of the pool of 4096 tokens."""
    front = Front(tmp_path, quota=QuotaConfig(tokens_per_minute=60, max_requests=3, kv_share=0.1))
    yield front
    await front.service.close()


def ask(prompt: str = "abcd", max_tokens: int | None = 6, id: str = "a", **sampling: Any) -> Generate:
    return Generate(id=id, prompt=prompt, sampling=Sampling(max_tokens=max_tokens, **sampling))


async def test_a_refusal_says_when_to_come_again_and_then_it_is_taken(front: Front) -> None:
    await front.taken(ask(max_tokens=46))
    failed = await front.refused(ask(max_tokens=16))
    assert (failed.code, failed.retry_after_s) == ("over_quota", 10.0)
    front.now_s += 10.0
    await front.taken(ask(max_tokens=16))


async def test_whoever_leaves_max_tokens_out_of_generate_waits_for_the_few_that_it_then_has(front: Front) -> None:
    await front.taken(ask(max_tokens=56))
    failed = await front.refused(ask(max_tokens=None))
    assert (failed.code, failed.retry_after_s) == ("over_quota", 4 + 16)
    front.now_s += 4 + 16
    await front.taken(ask(max_tokens=None))


async def test_one_caller_s_quota_is_not_another_s(front: Front) -> None:
    await front.taken(ask(max_tokens=56))
    await front.refused(ask())
    await front.taken(ask(), caller=BOB)


async def test_choices_and_prompts_together_count_as_what_they_need(front: Front) -> None:
    failed = await front.refused(ask(n=4))
    assert failed.code == "exceeds_quota"
    assert "needs 4, its caller may have 3 requests in flight" in failed.message
    await front.taken(ask(max_tokens=10, n=3))
    assert front.left() == 60 - 4 - 30
    assert (await front.refused(ask(id="0"), ask(id="1"))).code == "over_quota"


async def test_whoever_leaves_max_tokens_out_holds_what_it_may_get_and_gets_no_more_than_it_can_hold(
    front: Front,
) -> None:
    await front.taken(Chat(id="a", messages=[ChatMessage(role="user", content="hi")]))
    [request] = front.host.submitted
    assert len(request.prompt_token_ids) + request.params.max_tokens == 60
    assert front.left() == 0


async def test_what_an_answer_did_not_use_is_given_back(front: Front) -> None:
    request_id = await front.taken(ask(max_tokens=50))
    assert front.left() == 6
    front.host.produce(request_id, b"xy", finish_reason="stop", stop_token_id=121)
    assert front.left() == 60 - 4 - 2


async def test_a_prompt_that_the_engine_has_is_used_up_however_soon_it_is_cancelled(front: Front) -> None:
    request_id = await front.taken(ask(max_tokens=50))
    front.service.cancel(request_id)
    assert front.left() == 56
    front.now_s += 60
    await front.taken(ask(max_tokens=50))
    front.host.lose()
    assert front.left() == 60, "the engine's death is nobody's doing"


async def test_a_request_that_is_cancelled_while_it_is_tokenized_holds_nothing_afterwards(front: Front) -> None:
    heard: list[DaemonMessage] = []
    [request_id] = front.service.start([ask()], ANA, heard.append)
    front.service.cancel(request_id)
    await front.taken(ask("ab"), caller=BOB)
    assert (front.left(), front.service.metering.accounts.of(ANA).allowance.num_choices) == (60, 0)


async def test_what_is_refused_after_it_was_counted_holds_nothing(front: Front) -> None:
    await front.refused(Generate(id="a", prompt_token_ids=[999], sampling=Sampling(max_tokens=5)))
    assert front.left() == 60


async def test_a_text_that_is_certainly_too_much_is_refused_before_it_is_tokenized(front: Front) -> None:
    await front.taken(ask(max_tokens=50))
    failed: list[DaemonMessage] = []
    front.service.start([ask("b" * 5000)], ANA, failed.append)
    assert isinstance(failed[0], Failed)
    assert failed[0].code == "exceeds_quota"


async def test_salts_and_ids_make_no_other_caller(front: Front) -> None:
    await front.taken(Generate(id="a", prompt="ab", cache_salt="x", sampling=Sampling(max_tokens=58)))
    await front.refused(Generate(id="b", prompt="ab", cache_salt="y", sampling=Sampling(max_tokens=1)))


async def test_other_quotas_hold_at_once(front: Front) -> None:
    front.service.metering.replace_quotas(QuotaConfig(max_requests=1))
    await front.taken(ask(max_tokens=500))
    assert (await front.refused(ask())).code == "over_quota"


async def test_a_priority_that_the_caller_may_not_have_is_refused(tmp_path: Path) -> None:
    front = Front(tmp_path, quota=QuotaConfig(user={"1001": QuotaLimits(max_priority=0)}))
    failed = await front.refused(Generate(id="a", prompt="ab", priority=1))
    assert (failed.code, failed.message) == ("exceeds_quota", "priority = 1, its caller may have 0; lower it")
    assert failed.field == "priority"
    await front.taken(Generate(id="a", prompt="ab", priority=1), caller=BOB)
    await front.service.close()


async def test_a_caller_s_second_request_is_less_urgent_and_is_shown_as_it_was_asked_for(tmp_path: Path) -> None:
    front = Front(tmp_path)
    first = await front.taken(ask(max_tokens=100))
    front.host.stats = engine_stats(step_seconds={"forward": 0.1}, num_scheduled_tokens=5)
    front.host.produce(first, b"x")
    await front.taken(ask())
    await front.taken(ask(), caller=BOB)
    assert [request.priority for request in front.host.submitted] == [0, -5, 0]
    frame = await front.service.stats_frame(blocks=False)
    assert [row.priority for row in frame.requests] == [0, 0, 0]
    await front.service.close()


# What is told


async def test_over_http_it_is_429_with_the_time_and_over_zeromq_the_same(socket_folder: Path) -> None:
    quota = QuotaConfig(tokens_per_minute=60)
    async with serving(socket_folder, ScriptedHost(reply=lambda request: [120] * 56), quota=quota) as served:
        async with served.client() as client:
            await client.say(ask(max_tokens=56))
            await client.hear_end()
            await client.say(ask(max_tokens=16, id="b"))
            failed = await client.hear_end()
        body = {"prompt": "abcd", "max_tokens": 16}
        async with served.http.post("http://localhost/v1/completions", json=body) as response:
            answer = await response.json()
            assert (response.status, answer["error"]["code"]) == (429, "over_quota")
            retry_after_s = int(response.headers["Retry-After"])
        assert isinstance(failed, Failed)
        assert (failed.code, failed.id) == ("over_quota", "b")
        assert failed.retry_after_s is not None
        assert 19 <= failed.retry_after_s <= 20
        assert 19 <= retry_after_s <= 20
        status, answer = await served.post("/v1/completions", {"prompt": [1, 2, 3, 4], "max_tokens": 57})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "exceeds_quota", "max_tokens")


async def test_usage_is_told_to_whoever_asks(socket_folder: Path) -> None:
    host = ScriptedHost(num_cached_tokens=3)
    async with serving(socket_folder, host, quota=QuotaConfig(max_requests=2)) as served, served.client() as client:
        await client.say(ask(max_tokens=5))
        await client.hear_end()
        await client.say(ask(n=3))
        await client.hear_end()
        await client.say(GetUsage(id="u"))
        report = await client.hear()
        assert isinstance(report, UsageReport)
        [caller] = report.callers
        assert (caller.caller, caller.num_requests, caller.num_in_flight) == ("root", 1, 0)
        spent = caller.since_start
        assert (spent.prompt_tokens, spent.cached_tokens, spent.output_tokens) == (4, 3, 5)
        assert caller.refusals == {"requests": 1}
        assert (report.energy_source, spent.joules, spent.money) == ("", None, None)
        assert msgspec.json.encode(report)


async def test_metrics_and_frames_have_usage_and_costs_and_nothing_that_is_not_known(tmp_path: Path) -> None:
    front = Front(tmp_path, cost=CostConfig(watts=50.0, kwh_price=3.6e6), quota=QuotaConfig(tokens_per_minute=60))
    front.service.metrics.registry.register(MeteringCollector(front.service.metering))
    assert "pagedd:energy_joules_total{" not in front.service.metrics.render().decode()
    request_id = await front.taken(ask(max_tokens=50))
    await front.refused(ask())
    front.host.stats = engine_stats(step_seconds={"forward": 1.0}, num_scheduled_tokens=4)
    front.host.produce(request_id, b"x", num_cached_tokens=1)
    front.now_s += 1.0
    front.service.metering.tick({})
    samples = {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "model_name")): sample.value
        for family in text_string_to_metric_families(front.service.metrics.render().decode())
        for sample in family.samples
        if sample.name.startswith(("pagedd:caller", "pagedd:energy", "pagedd:cost"))
    }
    assert samples["pagedd:caller_requests_total", "1001"] == 1
    assert samples["pagedd:caller_requests_in_flight", "1001"] == 1
    assert samples["pagedd:caller_tokens_total", "1001", "cached"] == 1
    assert samples["pagedd:caller_refusals_total", "1001", "tokens"] == 1
    assert samples["pagedd:energy_joules_total", "stated"] == 50.0
    assert samples["pagedd:energy_joules_per_token", "all", "minute"] == 10.0
    assert samples["pagedd:cost_per_million_tokens", "prompt", "start"] > 0
    figures = (await front.service.stats_frame(blocks=False)).figures
    assert (figures["energy_joules_total"], figures["energy_joules_per_token"]) == (50.0, 10.0)
    await front.service.close()
