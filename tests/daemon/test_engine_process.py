"""The loop around the engine, with a link and an engine that a test scripts. Processes: `test_engine_host.py`."""

from dataclasses import replace

from pagedd.daemon.engine_link import Abort, Add, Exit, FromEngine, Idle, SetPace, StepDone, ToEngine
from pagedd.daemon.engine_process import serve
from pagedd.daemon.pace import Pace
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.stats import EngineStats

from .fake_engine import FakeEngine


class WatchedEngine(FakeEngine):
    """Counts the looks for drift, and with how much work each fell together."""

    def __init__(self) -> None:
        super().__init__()
        self.checks: list[int] = []

    def check_when_idle(self) -> None:
        self.checks.append(len(self.live))


class ScriptedLink:
    """Says one of `messages` whenever the engine would wait for ever, and is silent while it has work."""

    def __init__(self, *messages: ToEngine) -> None:
        self.messages = list(messages)
        self.sent: list[FromEngine] = []

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def receive(self, timeout_ms: int = -1) -> ToEngine | None:
        return None if timeout_ms == 0 else self.messages.pop(0)


def add(request_id: str, max_tokens: int) -> Add:
    return Add(
        request=Request(request_id=request_id, prompt_token_ids=[5], params=SamplingParams(max_tokens=max_tokens))
    )


def test_drift_is_looked_for_after_the_last_step_and_never_while_there_is_work() -> None:
    link, engine = ScriptedLink(add("a", 3), add("b", 1), Exit()), WatchedEngine()
    serve(link, engine)  # type: ignore[arg-type]
    assert [len(message.outputs) for message in link.sent if isinstance(message, StepDone)] == [1, 1, 1, 1]
    assert engine.checks == [0, 0]


def test_an_abort_without_a_step_after_it_is_told_once() -> None:
    link, engine = ScriptedLink(Abort(request_id="gone"), Exit()), WatchedEngine()
    serve(link, engine)  # type: ignore[arg-type]
    assert [message.outputs for message in link.sent if isinstance(message, StepDone)] == [[]]
    assert engine.checks == [0]


class SavingEngine(FakeEngine):
    """Saves a block after every step."""

    def after_step(self) -> bool:
        return True


def test_what_was_saved_after_the_last_step_is_told_too() -> None:
    link = ScriptedLink(add("a", 2), Exit())
    serve(link, SavingEngine())  # type: ignore[arg-type]
    assert [len(message.outputs) for message in link.sent if isinstance(message, StepDone)] == [1, 1, 0]


class EngineWithIdleWork(FakeEngine):
    """Has something to do once it has rested for 1.5 s, in two pieces, and then never again."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_pieces = 2

    @property
    def idle_work_due_s(self) -> float | None:  # type: ignore[override]
        return max(0.0, 1.5 - self.now_s) if self.num_pieces else None

    def check_when_idle(self) -> bool:
        is_due = self.idle_work_due_s == 0
        self.num_pieces -= is_due
        return is_due


class PatientLink(ScriptedLink):
    """Time passes while it is waited on, and nothing comes before the engine has done what it had to."""

    def __init__(self, engine: EngineWithIdleWork) -> None:
        super().__init__(Exit())
        self.engine = engine
        self.waits_ms: list[int] = []

    def receive(self, timeout_ms: int = -1) -> ToEngine | None:
        self.waits_ms.append(timeout_ms)
        self.engine.now_s += timeout_ms / 1000
        return self.messages.pop(0) if timeout_ms and not self.engine.num_pieces else None


def test_idle_work_is_done_when_it_is_due_and_told() -> None:
    engine = EngineWithIdleWork()
    link = PatientLink(engine)
    serve(link, engine)  # type: ignore[arg-type]
    assert link.waits_ms == [1000, 500, 0, 1000]
    assert [type(message) for message in link.sent] == [Idle, StepDone, StepDone]


class TenTokensAStep(FakeEngine):
    def stats(self) -> EngineStats:
        return replace(super().stats(), num_scheduled_tokens=10)


class TimedLink(ScriptedLink):
    """Time passes while it is waited on; `messages` come one at each look, and then nothing until the work is done."""

    def __init__(self, engine: FakeEngine, *messages: ToEngine) -> None:
        super().__init__(*messages)
        self.engine = engine
        self.now_s = 0.0
        self.waits_ms: list[int] = []

    def receive(self, timeout_ms: int = -1) -> ToEngine | None:
        if self.messages:
            return self.messages.pop(0)
        if not self.engine.has_work:
            return Exit()
        if timeout_ms:
            self.waits_ms.append(timeout_ms)
            self.now_s += timeout_ms / 1000
        return None


def test_a_paced_engine_waits_between_its_steps_and_lets_the_front_know_that_it_lives() -> None:
    engine = TenTokensAStep()
    link = TimedLink(engine, SetPace(tokens_per_second=8.0), add("a", 3))
    serve(link, engine, Pace(lambda: link.now_s))  # type: ignore[arg-type]
    assert link.waits_ms == [1000, 250, 1000, 250]
    assert [type(message) for message in link.sent] == [StepDone, Idle, StepDone, Idle, StepDone]


def test_an_unpaced_engine_waits_for_nothing() -> None:
    engine = TenTokensAStep()
    link = TimedLink(engine, SetPace(tokens_per_second=8.0), SetPace(tokens_per_second=None), add("a", 3))
    serve(link, engine, Pace(lambda: link.now_s))  # type: ignore[arg-type]
    assert link.waits_ms == []
