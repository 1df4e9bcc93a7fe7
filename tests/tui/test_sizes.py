"""Terminals of every size: a screen folds to it, or says that it is too small."""

import pytest

from pagedd.bench.frames import FakeEngine

from .conftest import FakeSource, FrozenReplay, make_app, make_source, screen_text, settled


@pytest.mark.parametrize("size", [(300, 100), (160, 48), (80, 24), (70, 24), (40, 12)])
@pytest.mark.parametrize("key", [*"12345", "enter", "question_mark"])
async def test_every_screen_folds_to_every_size(size: tuple[int, int], key: str) -> None:
    app = make_app(FrozenReplay())
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        await pilot.press(key)
        await settled(pilot)
        text = screen_text(app)
        assert "pagetop" in text
        assert all(len(line) <= size[0] for line in text.splitlines())


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((80, 11), "too small: 80x11, needs 40x12"),
        ((39, 24), "too small: 39x24, needs 40x12"),
        ((20, 5), "too small: 20x5, ne…"),
        ((1, 1), "…"),
    ],
)
async def test_a_terminal_that_is_too_small_is_told_so(size: tuple[int, int], words: str) -> None:
    app = make_app(make_source())
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        assert screen_text(app).strip() == words


async def test_fifty_sizes_while_frames_arrive() -> None:
    engine = FakeEngine(num_blocks=5000, num_requests=30)
    source = FakeSource([engine.frame()])
    app = make_app(source)
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        for number in range(50):
            source.say(engine.frame())
            await pilot.resize_terminal(1 + number * 37 % 200, 1 + number * 11 % 70)
            if number % 10 == 0:
                await pilot.press(str(1 + number // 10))
        await pilot.resize_terminal(120, 38)
        await settled(pilot)
        assert "pagetop" in screen_text(app)
