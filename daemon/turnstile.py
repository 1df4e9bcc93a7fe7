"""Few requests begin in a turn of the event loop, however many have arrived: what else there is to do comes in between.

Without it a crowd that is refused again and again holds up the health check, the engine's tokens and everybody's
streams for as long as a whole round of refusals takes. Knows no request.
"""

import asyncio
from collections import deque


class Turnstile:
    """Lets `num_a_turn` through in each turn of one event loop, in the order of their arrival."""

    def __init__(self, num_a_turn: int) -> None:
        self._num_a_turn = num_a_turn
        self._num_left = num_a_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False

    async def enter(self) -> None:
        """Returns in a turn that has room."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._next_turn, loop)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append(place)
        await place

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_left = self._num_a_turn
        while self._waiting and self._num_left:
            place = self._waiting.popleft()
            if not place.done():  # who left meanwhile has cancelled it
                place.set_result(None)
                self._num_left -= 1
        self._is_turning = self._num_left < self._num_a_turn
        if self._is_turning:
            loop.call_soon(self._next_turn, loop)
