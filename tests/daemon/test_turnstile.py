"""Requests that arrive together begin a few at a time, in order."""

import asyncio

from pagedd.daemon.turnstile import Turnstile


async def test_others_have_their_turn_between_those_who_arrived_together() -> None:
    turnstile = Turnstile(2)
    seen: list[str] = []

    async def enter(name: str) -> None:
        await turnstile.enter()
        seen.append(name)

    async def other() -> None:
        for _ in range(3):
            seen.append("-")
            await asyncio.sleep(0)

    await asyncio.gather(*(enter(name) for name in "abcdef"), other())
    assert [name for name in seen if name != "-"] == list("abcdef")
    assert seen[:3] == ["a", "b", "-"]
    assert "-" not in seen[seen.index("e") :]


async def test_who_leaves_takes_nobodys_place() -> None:
    turnstile = Turnstile(1)
    await turnstile.enter()
    places = [asyncio.create_task(turnstile.enter()) for _ in range(3)]
    await asyncio.sleep(0)
    places[0].cancel()
    await asyncio.wait_for(asyncio.gather(*places[1:]), 5)


async def test_after_a_crowd_it_is_as_open_as_before() -> None:
    turnstile = Turnstile(2)
    await asyncio.gather(*(turnstile.enter() for _ in range(9)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    entered = [asyncio.create_task(turnstile.enter()) for _ in range(2)]
    await asyncio.sleep(0)
    assert all(task.done() for task in entered)
