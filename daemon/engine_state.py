"""Where the engine process is in its life, and what that means for whoever wants something of it now."""

from enum import Enum

from pagedd.client.errors import PageddError
from pagedd.client.percent import percent


class EngineState(Enum):
    """Changed only by `engine_lives.EngineLives`."""

    STARTING = "starting"  # nothing loads yet: the model is being fetched or the process comes up
    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"  # it was ready, and has been in one step for long
    RESTARTING = "restarting"  # it died; the next one starts after a pause
    FAILED = "failed"  # it cannot be started; the detail says why
    ASLEEP = "asleep"  # there is none, on purpose, until somebody wakes it
    STOPPED = "stopped"


def in_words(state: EngineState, progress: float, detail: str) -> str:
    """E.g. `loading, 43 % (weights)`; `progress` is 0–1."""
    if state in (EngineState.STARTING, EngineState.LOADING):
        return f"loading, {percent(progress)} % ({detail})"
    return f"{state.value}: {detail}" if detail else state.value


def check_ready(state: EngineState, progress: float, detail: str) -> None:
    """Raises `PageddError` unless the engine takes requests."""
    match state:
        case EngineState.READY:
            return
        case EngineState.STARTING | EngineState.LOADING:
            raise PageddError("engine_loading", f"{in_words(state, progress, detail)}; try again shortly")
        case EngineState.RESTARTING:
            raise PageddError("engine_died", f"{detail}; try again shortly")
        case EngineState.STALLED:
            raise PageddError("engine_stalled", f"{detail}; try again shortly")
        case EngineState.ASLEEP:
            raise PageddError("engine_asleep", "the engine has just been put to sleep; try again")
        case EngineState.FAILED:
            raise PageddError("engine_failed", f"{detail}; see the daemon's log")
        case EngineState.STOPPED:
            raise PageddError("shutting_down", "the daemon is stopping")
