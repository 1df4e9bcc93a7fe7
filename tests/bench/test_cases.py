"""The three case tables: what a gain is, who the users are, and the pictures."""

import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagedd.bench.case_gain import Gain, arrow
from pagedd.bench.case_pictures import draw_pictures
from pagedd.bench.cases import Bench, conversations, mixed_lengths
from pagedd.engine.config import EngineConfig
from pagedd.engine.kv.open_pages import OpenPages


def test_a_gain_is_how_many_times_better_the_figure_became() -> None:
    more = Gain("throughput", "tokens/s", (1200, 3800), (500, 1000), target=2.5)
    less = Gain("first token", "ms", (850, 420), (900, 300), target=2.5, is_less_better=True)
    assert (round(more.published_gain, 2), more.measured_gain, more.is_met) == (3.17, 2.0, False)
    assert (round(less.published_gain, 2), less.measured_gain, less.is_met) == (2.02, 3.0, True)
    assert Gain("utilisation", "%", (45, 92), (40, 90)).is_met is None


def test_a_row_has_both_pairs_and_says_what_is_missed() -> None:
    row = Gain("throughput", "tokens/s", (1200, 3800), (500.4, 1000.6), target=2.5).row()
    assert list(row.values()) == ["throughput (tokens/s)", "1200 → 3800", "3.2x", "500 → 1001", "2.0x", "2.5x MISSED"]
    assert arrow((1.984, 63.47)) == "1.98 → 63.5"


def test_a_conversation_goes_on_from_its_answers_and_begins_anew_after_its_turns() -> None:
    system = [7] * 200
    user = conversations(system, random.Random(1))
    asked = next(user)
    lengths = []
    for _ in range(12):
        assert asked.prompt_token_ids[:200] == system
        lengths.append(len(asked.prompt_token_ids))
        asked = user.send([9] * asked.num_output_tokens)
    falls = [number for number, (one, two) in enumerate(itertools.pairwise(lengths)) if two < one]
    assert [later - earlier for earlier, later in itertools.pairwise(falls)] == [4] * (len(falls) - 1)


def test_blocks_of_both_sides_open_the_pages_of_the_cache_that_they_are_in(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SimpleNamespace(open_pages=OpenPages(4))
    monkeypatch.setattr("pagedd.bench.cases.create_runner", lambda config, progress: (runner, None))
    bench = Bench(EngineConfig(model="m"), seconds=1, warmup_s=1, num_rounds=1)
    assert bench.blocks(64).open_pages is runner.open_pages
    assert bench.slabs(2, 64).open_pages is runner.open_pages


def test_lengths_stay_within_the_context() -> None:
    asked = list(itertools.islice(mixed_lengths(random.Random(1), 64), 200))
    assert max(len(one.prompt_token_ids) + one.num_output_tokens for one in asked) <= 64


def test_each_case_has_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gain = Gain("throughput", "tokens/s", (1200, 3800), (500, 1000))
    draw_pictures({"paging": [gain], "prefix caching": [gain, gain]}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["case-paging.png", "case-prefix-caching.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
