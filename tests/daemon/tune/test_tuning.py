"""The order of advice, with trials that a table decides: what is tried, what is kept, and when it stops."""

from collections.abc import Callable
from typing import Any

from pagedd.daemon.tune.trial import TrialResult
from pagedd.daemon.tune.tuning import Tried, Tuning
from pagedd.engine.config import EngineConfig

Rate = Callable[[EngineConfig], float]


class Bench:
    """Answers trials by a function of the settings, and counts them."""

    def __init__(self, rate: Rate, *, kv_usage: float = 0.5, agreements: dict[str, int] | None = None) -> None:
        self._rate = rate
        self._kv_usage = kv_usage
        self._num_wrong = agreements or {}
        self.num_trials = 0

    def attempt(self, config: EngineConfig, texts: list[list[int]] | None) -> TrialResult:
        self.num_trials += 1
        form = "int8" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        wrong = self._num_wrong.get(form, 0)
        return TrialResult(
            output_tokens_per_s=self._rate(config),
            kv_usage=self._kv_usage,
            kv_cache_dtype=form,
            max_num_batched_tokens=64,
            choices=None if texts is None else [1] * wrong + [0] * (100 - wrong),
        )


def run(config: EngineConfig, bench: Bench) -> tuple[Tuning, list[Tried]]:
    tuning = Tuning(config, bench.attempt, [[1]], is_gpu=False)
    return tuning, list(tuning.run())


def kept(tried: list[Tried]) -> list[dict[str, Any]]:
    return [one.changed for one in tried if one.is_kept and one.changed]


def test_settings_that_are_right_stay_as_they_are() -> None:
    tuning, tried = run(EngineConfig(model="m"), Bench(lambda config: 100.0))
    assert tuning.changes == {}
    assert kept(tried) == []
    steps = ["as configured", "prefix caching", *["block size"] * 2, "memory share", *["seats"] * 2, *["KV form"] * 5]
    assert [one.step for one in tried] == steps


def test_each_step_starts_from_what_the_one_before_kept() -> None:
    def rate(config: EngineConfig) -> float:
        return 100.0 * (1.5 if config.enable_prefix_caching else 1) * (1.2 if config.block_size == 8 else 1)

    tuning, tried = run(EngineConfig(model="m", enable_prefix_caching=False), Bench(rate))
    assert tuning.changes == {"enable_prefix_caching": True, "block_size": 8}
    assert kept(tried) == [{"enable_prefix_caching": True}, {"block_size": 8}]


def test_seats_double_while_that_brings_more_and_the_budget_follows() -> None:
    tuning, _ = run(EngineConfig(model="m"), Bench(lambda config: float(min(config.max_num_seqs, 128))))
    assert tuning.changes == {"max_num_seqs": 128, "max_num_batched_tokens": 128}


def test_seats_are_halved_when_more_bring_nothing_and_fewer_do() -> None:
    tuning, _ = run(EngineConfig(model="m"), Bench(lambda config: 1000.0 / config.max_num_seqs))
    assert tuning.changes == {"max_num_seqs": 16}


def test_memory_is_tried_only_where_the_pool_is_full() -> None:
    def rate(config: EngineConfig) -> float:
        return 100.0 * (config.gpu_memory_utilization or 0.3)

    assert run(EngineConfig(model="m"), Bench(rate))[0].changes == {}
    assert run(EngineConfig(model="m"), Bench(rate, kv_usage=0.95))[0].changes == {"gpu_memory_utilization": 0.7}
    # Exactly so many blocks were asked for.
    assert run(EngineConfig(model="m", num_blocks=9), Bench(rate, kv_usage=0.95))[0].changes == {}


def test_a_memory_share_that_is_not_tried_has_a_line_that_says_why() -> None:
    def why(config: EngineConfig, kv_usage: float) -> str:
        _, tried = run(config, Bench(lambda config: 100.0, kv_usage=kv_usage))
        (line,) = [one for one in tried if one.step == "memory share"]
        assert not line.is_judged
        return line.note

    assert why(EngineConfig(model="m"), 0.5) == "none tried: 50 % of the pool is in use"
    assert why(EngineConfig(model="m", num_blocks=9), 0.95) == "none tried: num_blocks = 9 decides"
    assert why(EngineConfig(model="m", gpu_memory_utilization=0.9), 0.95) == "none tried: 0.9 is as much as is tried"


def test_what_was_better_by_chance_is_not_kept() -> None:
    class Moody(Bench):
        def attempt(self, config: EngineConfig, texts: list[list[int]] | None) -> TrialResult:
            result = super().attempt(config, texts)
            result.output_tokens_per_s = 200.0 if self.num_trials == 2 else 100.0
            return result

    tuning, tried = run(EngineConfig(model="m"), Moody(lambda config: 100.0))
    assert tuning.changes == {}
    assert (tried[1].gain, tried[1].is_kept, tried[1].note) == (2.0, False, "+0 % when tried again")


def test_a_quicker_form_is_chosen_only_if_it_chooses_as_16_bits_do() -> None:
    speeds = {"auto": 100.0, "bf16": 90.0, "fp8": 150.0, "int8": 100.0, "k8v4": 100.0, "int4": 200.0}
    bench = Bench(lambda config: speeds[config.kv_cache_dtype], agreements={"int4": 20, "fp8": 5, "int8": 1})
    tuning, tried = run(EngineConfig(model="m"), bench)
    assert tuning.changes == {"kv_cache_dtype": "fp8"}
    assert "80.0 % as 16 bits, 90 % wanted" in [one.note for one in tried]


def test_a_form_that_misses_its_bar_by_chance_stays() -> None:
    bench = Bench(lambda config: 100.0, agreements={"int8": 5})  # of a hundred, where 3 are usual
    assert run(EngineConfig(model="m"), bench)[0].changes == {}


def test_what_holds_is_measured_anew_beside_each_step_on_a_machine_that_gets_slower() -> None:
    class Tired(Bench):
        def attempt(self, config: EngineConfig, texts: list[list[int]] | None) -> TrialResult:
            result = super().attempt(config, texts)
            result.output_tokens_per_s = 1000.0 * 0.9**self.num_trials
            return result

    _, tried = run(EngineConfig(model="m"), Tired(lambda config: 100.0))
    assert min(one.gain for one in tried if one.gain is not None) > 0.5


def test_a_form_that_holds_and_errs_too_often_gives_way_even_to_a_slower_one() -> None:
    speeds = {"auto": 100.0, "bf16": 90.0, "fp8": 80.0, "int8": 100.0, "k8v4": 80.0, "int4": 200.0}
    bench = Bench(lambda config: speeds[config.kv_cache_dtype], agreements={"int4": 20, "fp8": 18, "int8": 15})
    assert run(EngineConfig(model="m"), bench)[0].changes == {"kv_cache_dtype": "bf16"}


def test_settings_that_cannot_be_tried_at_all_end_it() -> None:
    tuning = Tuning(EngineConfig(model="m"), lambda config, texts: TrialResult(error="no memory"), [], is_gpu=False)
    assert [one.note for one in tuning.run()] == ["no memory"]


def test_what_ran_beside_others_is_tried_once_more_and_never_kept() -> None:
    waited = {8: [0.5, 0.05], 32: [0.5, 0.4]}

    class Busy(Bench):
        def attempt(self, config: EngineConfig, texts: list[list[int]] | None) -> TrialResult:
            result = super().attempt(config, texts)
            result.waited_ratio = waited[config.block_size].pop(0) if waited.get(config.block_size) else 0.0
            return result

    rates = {8: 120.0, 16: 100.0, 32: 900.0}
    tuning, tried = run(EngineConfig(model="m"), Busy(lambda config: rates[config.block_size]))
    assert tuning.changes == {"block_size": 8}
    assert [one.note for one in tried if one.step == "block size"] == [
        "+20 % when tried again",
        "not judged: others had the cores 40 % of the time",
    ]


def test_the_line_that_says_which_form_was_chosen_is_no_trial_of_its_own() -> None:
    _, tried = run(EngineConfig(model="m"), Bench(lambda config: 200.0 if config.kv_cache_dtype == "fp8" else 100.0))
    assert [one.note for one in tried if one.is_repeated and one.changed] == ["chosen"]


def test_nothing_is_judged_that_has_nothing_sound_beside_it() -> None:
    sound, disturbed = TrialResult(output_tokens_per_s=1.0), TrialResult(output_tokens_per_s=1.0, waited_ratio=0.5)
    assert Tried("seats", {"max_num_seqs": 2}, sound, sound).is_judged
    assert not Tried("as configured", {}, sound, None).is_judged
    assert not Tried("seats", {"max_num_seqs": 2}, sound, disturbed).is_judged
    assert not Tried("seats", {"max_num_seqs": 2}, disturbed, sound).is_judged
