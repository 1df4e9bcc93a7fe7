"""The window that advice is judged by: only seconds with work, only this engine, only the last minutes."""

import pytest

from pagedd.daemon.accounts import Accounts
from pagedd.daemon.caller import Caller
from pagedd.daemon.doctor import MAX_AGE_S, MAX_SAMPLES, Doctor
from pagedd.daemon.quota import Hold, Need
from pagedd.daemon.quota_config import QuotaConfig
from pagedd.engine.kv.quality import KVQuality
from pagedd.engine.request import Preemption
from pagedd.engine.stats import EngineStats

from .scripted_host import engine_info

INFO = engine_info()


class Clinic:
    """A doctor with a clock that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_steps = 0
        self.accounts = Accounts(QuotaConfig(), lambda: self.now_s)
        self.doctor = Doctor(self.accounts, caches_prefixes=False, clock=lambda: self.now_s)

    def second(self, running: int = 1, waiting: int = 0, used: int = 4, live: int = 16, **more: int) -> None:
        self.now_s += 1
        self.num_steps += 1
        self.doctor.look(
            EngineStats(
                num_blocks=10,
                block_size=4,
                max_num_seqs=4,
                max_num_batched_tokens=16,
                max_model_len=32,
                num_blocks_used=used,
                num_live_tokens=live,
                num_requests_running=running,
                num_requests_waiting=waiting,
                steps_total=self.num_steps,
                **more,
            )
        )


@pytest.fixture
def clinic() -> Clinic:
    return Clinic()


def test_seconds_without_work_are_no_part_of_the_averages(clinic: Clinic) -> None:
    clinic.second(running=0, used=0, live=0)
    clinic.second(running=4, waiting=2, used=8, live=24)
    clinic.second(running=2, used=4, live=16)
    window = clinic.doctor.window(INFO)
    assert (window.busy_s, window.kv_usage, window.waiting_ratio) == (2.0, pytest.approx(0.6), 0.5)
    assert window.fragmentation == pytest.approx(0.125)
    assert (window.kv_usage_waiting, window.occupancy_waiting) == (0.8, 1.0)


def test_who_waits_for_a_prefix_in_flight_does_not_wait_for_room(clinic: Clinic) -> None:
    clinic.second(waiting=3, num_requests_awaiting_prefix=3)
    clinic.second(waiting=3, num_requests_awaiting_prefix=2)
    assert clinic.doctor.window(INFO).waiting_ratio == 0.5


def test_who_waits_because_of_a_pace_would_wait_with_any_setting(clinic: Clinic) -> None:
    for clinic.doctor.is_paced in (True, False):
        clinic.second(running=4, waiting=3)
    assert clinic.doctor.window(INFO).waiting_ratio == 0.5


def test_another_engine_begins_anew(clinic: Clinic) -> None:
    for _ in range(3):
        clinic.doctor.saw_prompt([7] * 64, "ana")
    clinic.second()
    clinic.doctor.look(None)
    assert clinic.doctor.observed_s == 0
    assert clinic.doctor.window(INFO).num_prompts == 0
    clinic.second()
    clinic.doctor.saw_prompt([8] * 64, "ana")
    clinic.num_steps = 0
    clinic.second()
    assert clinic.doctor.observed_s == 1
    assert clinic.doctor.window(INFO).num_prompts == 0
    clinic.doctor.saw_prompt([8] * 64, "ana")
    assert (clinic.doctor.window(INFO).num_prompts, clinic.doctor.window(INFO).repeated_ratio) == (1, 1)


def test_what_is_old_is_forgotten(clinic: Clinic) -> None:
    clinic.second()
    clinic.now_s += MAX_AGE_S + 1
    clinic.second(running=0)
    assert clinic.doctor.observed_s == 0
    for _ in range(MAX_SAMPLES + 5):
        clinic.second()
    assert clinic.doctor.observed_s == MAX_SAMPLES


def test_prompts_count_from_the_window_on(clinic: Clinic) -> None:
    for _ in range(3):
        clinic.doctor.saw_prompt([7] * 64, "ana")
    clinic.second()
    window = clinic.doctor.window(INFO)
    assert (window.num_prompts, window.repeated_ratio) == (3, pytest.approx(2 / 3))
    clinic.now_s += MAX_AGE_S + 1
    clinic.second()
    clinic.doctor.saw_prompt([8] * 64, "ana")
    assert (clinic.doctor.window(INFO).num_prompts, clinic.doctor.window(INFO).repeated_ratio) == (1, 0)


def test_only_preemptions_for_blocks_count_and_what_they_cost_is_told(clinic: Clinic) -> None:
    clinic.second(prompt_tokens_total=100)
    for what in ("blocks", "seat"):
        clinic.doctor.preempted(
            [Preemption(request_id="a", choice_index=0, by_request_id="b", for_what=what)]  # type: ignore[arg-type]
        )
    clinic.second(prompt_tokens_total=160, generation_tokens_total=20, recomputed_tokens_total=20)
    window = clinic.doctor.window(INFO)
    assert (window.preemptions_per_minute, window.recomputed_ratio) == (30.0, 0.2)


def test_the_top_caller_is_named_only_beside_others(clinic: Clinic) -> None:
    pool_tokens = INFO.num_blocks * INFO.block_size
    ana, bob = (clinic.accounts.of(Caller(uid=uid)) for uid in (1001, 1002))
    ana.allowance.hold([(Hold(), Need(1, pool_tokens // 2, pool_tokens // 2))], pool_tokens)
    clinic.second()
    assert clinic.doctor.window(INFO).top_caller == ""
    bob.allowance.hold([(Hold(), Need(1, 1, 1))], pool_tokens)
    clinic.second()
    window = clinic.doctor.window(INFO)
    assert (window.top_caller, window.top_caller_share) == (ana.name, pytest.approx(0.25))


def test_a_cache_that_the_check_at_load_found_poor_is_advised_against(clinic: Clinic) -> None:
    assert clinic.doctor.window(INFO).kv_quality is None
    quality = KVQuality(form="int8", agreement=0.5, divergence_nats=1.0, num_tokens=768)
    (advice,) = clinic.doctor.advice(engine_info(kv_cache_dtype="int8", kv_quality=quality))
    assert (advice.cause, advice.change) == ("kv_quality", "--kv-cache-dtype bf16")
