"""Refusals and faults that the engine raises; `daemon` passes code and message on unchanged."""


class EngineError(Exception):
    """`code` is stable and listed in the project's error table; `message` says value, limit and next step."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class DeviceLostError(RuntimeError):
    """The device answers nothing any more; only a new process can use it again, if it comes back at all."""


class IntegrityError(RuntimeError):
    """The engine's own bookkeeping contradicts itself: a fault of pagedd, never of a request."""
