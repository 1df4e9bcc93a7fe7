"""Other settings for the engine in place of those before, and back where their engine cannot load.

Owns the order: whoever serves texts changes over while there is no engine, so that none computes what was tokenized for
another model. When processes end and start is `engine_lives.py`'s.
"""

from collections.abc import Callable

from pagedd.client.errors import PageddError
from pagedd.engine.config import EngineConfig


class Swap:
    """Other settings on their way in place of those before.

    Attributes:
        failure: why their engine could not load.
        is_done: it is ready.
    """

    def __init__(self, config: EngineConfig, take_over: Callable[[], None], take_back: Callable[[], None]) -> None:
        self.failure: PageddError | None = None
        self.is_done = False
        self._config = config
        self._take_over = take_over
        self._take_back = take_back
        self._before: EngineConfig | None = None

    def begin(self, before: EngineConfig | None) -> EngineConfig:
        """The settings from now on, while there is no engine."""
        self._before = before
        self._take_over()
        return self._config

    def undo(self, failure: PageddError) -> EngineConfig | None:
        """The settings before, which are those from now on."""
        self.failure = failure
        self._take_back()
        return self._before
