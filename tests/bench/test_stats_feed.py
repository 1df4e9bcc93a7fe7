"""What a picture costs, of a pool as crowded as it is said to be."""

from pagedd.bench.stats_feed import (
    NUM_SEQUENCES,
    crowded_engine,
    picture_costs,
    picture_row,
)


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
