"""An engine's host over the scripted engine's process, and what it says to the service, in order."""

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from pagedd.daemon.engine_host import EngineHost
from pagedd.daemon.engine_state import EngineState
from pagedd.engine.request import Preemption, Request, SequenceOutput
from pagedd.engine.sampling_params import SamplingParams

FAKE_ENGINE = (sys.executable, "-P", str(Path(__file__).with_name("fake_engine.py")))


class Recorder:
    """What the service would hear from the host, in order."""

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self.outputs: list[SequenceOutput] = []
        self.preempted: list[Preemption] = []
        self.refused: list[tuple[str, str, str]] = []
        self.lost: list[str] = []
        self.states: list[EngineState] = []
        self.num_reports = 0
        host.on_preempted = self.preempted.extend
        host.on_outputs = self._heard
        host.on_refused = lambda *refusal: self.refused.append(refusal)
        host.on_lost = self.lost.append
        host.on_state = self._saw_state

    def _heard(self, outputs: list[SequenceOutput]) -> None:
        self.num_reports += 1
        self.outputs += outputs

    def _saw_state(self) -> None:
        if not self.states or self.states[-1] is not self.host.state:
            self.states.append(self.host.state)

    def tokens_of(self, request_id: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == request_id for token in output.token_ids]


def request(request_id: str, *prompt: int, max_tokens: int = 3) -> Request:
    return Request(request_id=request_id, prompt_token_ids=list(prompt), params=SamplingParams(max_tokens=max_tokens))


StartHost = Callable[..., Awaitable[Recorder]]
