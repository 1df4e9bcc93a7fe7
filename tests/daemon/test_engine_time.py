"""Seconds of the engine's steps, shared out between prompts and output by the tokens of each step."""

from pagedd.daemon.engine_time import EngineTime

from .scripted_host import engine_stats


def test_a_step_is_shared_by_the_tokens_that_it_computed_for_each() -> None:
    time = EngineTime()
    time.stepped(engine_stats(step_seconds={"forward": 3.0, "sample": 1.0}, num_scheduled_tokens=8), num_decoded=2)
    assert (time.prompt_s, time.output_s) == (3.0, 1.0)
    time.stepped(engine_stats(step_seconds={"forward": 5.0, "sample": 1.0}, num_scheduled_tokens=2), num_decoded=2)
    assert (time.prompt_s, time.output_s) == (3.0, 3.0)


def test_guesses_are_output() -> None:
    time = EngineTime()
    stats = engine_stats(step_seconds={"forward": 4.0}, num_scheduled_tokens=8, drafted_tokens_total=6)
    time.stepped(stats, num_decoded=2)
    assert (time.prompt_s, time.output_s) == (0.0, 4.0)


def test_a_report_without_a_step_is_kept_for_the_next() -> None:
    time = EngineTime()
    time.stepped(engine_stats(step_seconds={"schedule": 1.0}, num_scheduled_tokens=0), num_decoded=0)
    assert time.total_s == 0.0
    time.stepped(engine_stats(step_seconds={"schedule": 2.0}, num_scheduled_tokens=4), num_decoded=0)
    assert (time.prompt_s, time.output_s) == (2.0, 0.0)


def test_another_engine_counts_anew() -> None:
    time = EngineTime()
    time.stepped(engine_stats(step_seconds={"forward": 9.0}, num_scheduled_tokens=1), num_decoded=1)
    time.stepped(engine_stats(step_seconds={"forward": 1.0}, num_scheduled_tokens=1), num_decoded=1)
    assert time.output_s == 10.0
