"""What watching costs: a window against its neighbours, and a picture of a pool as crowded as it is said to be."""

import os
import threading

import pytest

from pagedd.bench.stats_feed import (
    NUM_SEQUENCES,
    Window,
    cpu_s,
    crowded_engine,
    differences,
    picture_costs,
    picture_row,
    share_row,
    step_rows,
)


def test_a_drift_of_the_steps_is_no_cost_of_watching():
    without = [1.0, 1.2, 1.4, 1.6]
    assert differences(without, [1.1, 1.3, 1.5]) == pytest.approx([0.0, 0.0, 0.0])
    assert differences(without, [1.1, 1.3 * 1.02, 1.5]) == pytest.approx([0.0, 0.02, 0.0])


def test_the_table_shows_the_median_difference_and_its_spread():
    without = [Window(1.0, 0.5, 0.01, 0.0)] * 4
    watched = [Window(wall_s, 0.5, 0.02, 0.09) for wall_s in (1.01, 1.02, 1.03)]
    wall, engine = step_rows("3 sockets", without, watched)
    assert wall["difference %"] == pytest.approx(2.0)
    assert wall["step ms without"] == 1000.0
    assert wall["first quartile %"] <= wall["difference %"] <= wall["third quartile %"]
    assert engine["measure"] == "engine CPU"
    assert engine["difference %"] == 0.0, "who competes for the processor is not in the engine's own time"
    shares = share_row("3 sockets", without, watched)
    assert (shares["front %"], shares["watchers %"]) == (pytest.approx(1.0), pytest.approx(9.0))


def test_processor_time_is_that_of_all_threads():
    before = cpu_s(os.getpid())
    worker = threading.Thread(target=lambda: sum(range(3_000_000)))
    worker.start()
    while worker.is_alive():
        now = cpu_s(os.getpid())
    worker.join()
    assert now > before


def test_the_crowded_engine_uses_most_of_its_blocks_and_keeps_some():
    engine = crowded_engine(1280)
    stats = engine.stats()
    assert stats.num_requests_running == NUM_SEQUENCES
    assert (stats.num_blocks_used, stats.num_blocks_cached) == (64 * 12, 64 * 4)
    engine.check_integrity()


async def test_a_pictures_cost_has_both_sides_and_its_size():
    costs = await picture_costs(1280, repeats=2)
    assert costs["engine"] > 0
    assert costs["front"] > 0
    assert costs["bytes"] > 4 * 1280
    assert picture_row(1280, costs)["blocks"] == 1280
