"""The life of one request, without I/O: `handle(event)` returns the actions that its owner has to carry out, in order.

    admitting ──Admitted──► running ──last choice finished──► ended
        └──────────Rejected, Broken, Cancelled, ClientGone──────┘

Owns the promise that a request has exactly one terminal message, and turns token ids into text: each choice has its own
detokenizer and stop matcher. Knows no socket and no engine; `live_requests.py` feeds it and does what it says.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from pagedd.client.protocol import Accepted, Choice, DaemonMessage, Delta, Done, Failed, Usage, Waking
from pagedd.daemon.logprob_list import LogprobList
from pagedd.daemon.text.detokenizer import Detokenizer
from pagedd.daemon.text.stop_strings import StopMatcher
from pagedd.daemon.text.tokenizer import TextTokenizer
from pagedd.engine.request import Request, SequenceOutput, TokenLogprobs

# Events: what may happen to a request.


@dataclass(frozen=True, slots=True)
class Admitted:
    """It is valid and there is room for it: `request` is what the engine shall run, with the model of that name."""

    request: Request
    model: str


@dataclass(frozen=True, slots=True)
class Held:
    """It waits until the engine is awake."""


@dataclass(frozen=True, slots=True)
class Produced:
    """One step of the engine did this for one of its choices."""

    output: SequenceOutput


@dataclass(frozen=True, slots=True)
class Broken:
    """It was refused, or cannot go on. `engine_has_it` says whether the engine still has to be told."""

    code: str
    message: str
    field: str | None = None
    engine_has_it: bool = False
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Somebody who may do so asked to end it; its client is still there and hears `Done` with what there is."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody is left to hear anything."""


Event = Held | Admitted | Produced | Broken | Cancelled | ClientGone

# Actions: what its owner has to do.


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """The engine shall end the request, or only one choice of it."""

    request_id: str
    choice_index: int | None = None


@dataclass(frozen=True, slots=True)
class Send:
    message: DaemonMessage


Action = Submit | Abort | Send


class Phase(Enum):
    ADMITTING = "admitting"  # being validated and tokenized; the engine has not heard of it
    RUNNING = "running"  # the engine has it
    ENDED = "ended"  # its terminal message is out, or its client is gone


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One `Generate` or `Chat`. Mutated only by `handle`.

    Attributes:
        id: the client's own name for it.
        request_id: the daemon's, unique among live requests.
        model: the name of the one that answers; before `Admitted`, of the one that was served when it came.
        num_choices: n.
        stream: send a `Delta` whenever a choice has new text.
        min_tokens: stop strings do not count before so many tokens.
        outcome: once it has ended: the finish reason of its last choice, or `error`.
    """

    id: str
    request_id: str
    model: str
    num_choices: int = 1
    stream: bool = True
    stop: list[str] = field(default_factory=list)
    min_tokens: int = 0
    phase: Phase = Phase.ADMITTING
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    outcome: str | None = None
    _choices: list["_ChoiceText"] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self._choices)

    def texts(self) -> list[str]:
        """What each choice has produced so far, but for what a stop string may still claim."""
        return ["".join(choice.texts) for choice in self._choices]

    def finish_reasons(self) -> list[str]:
        """Of the choices that have ended."""
        return [choice.finish_reason for choice in self._choices if choice.finish_reason is not None]

    def open_texts(self, tokenizer: TextTokenizer) -> None:
        """Gives every choice its detokenizer. Called once, before `Admitted`."""
        self._choices = [
            _ChoiceText(index, Detokenizer(tokenizer), StopMatcher(self.stop), tokenizer.token_text, self.min_tokens)
            for index in range(self.num_choices)
        ]

    def handle(self, event: Event) -> list[Action]:
        """What `event` asks the owner to do, in order.

        After the end that is nothing: late tokens of an aborted request, a cancel that crossed `Done` on its way.
        """
        if self.has_ended:
            return []
        match event:
            case Held():
                return [Send(Waking(id=self.id, request_id=self.request_id))]
            case Admitted(request, model):
                self.model = model
                return self._admitted(request)
            case Produced(output):
                return self._produced(output)
            case Broken():
                failed = Failed(
                    id=self.id,
                    code=event.code,
                    message=event.message,
                    field=event.field,
                    request_id=self.request_id,
                    retry_after_s=event.retry_after_s,
                )
                return [*self._end("error", abort=event.engine_has_it), Send(failed)]
            case Cancelled():
                return self._cancelled()
            case ClientGone():
                return self._end("abort", abort=True)

    def _admitted(self, request: Request) -> list[Action]:
        self.phase = Phase.RUNNING
        self.num_prompt_tokens = len(request.prompt_token_ids)
        return [Submit(request), Send(Accepted(id=self.id, request_id=self.request_id))]

    def _produced(self, output: SequenceOutput) -> list[Action]:
        if output.finish_reason == "error":
            code, message = output.error_code or "internal", output.error_message or "the engine gave no reason"
            # The other choices of the request share its fate: one request has one terminal message.
            return self.handle(Broken(code, message, engine_has_it=self.num_choices > 1))
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        choice = self._choices[output.choice_index]
        if choice.finish_reason is not None:
            return []  # it ended at a stop string, and these tokens were on their way already
        choice.push(output)
        actions: list[Action] = []
        if self.stream and (delta := choice.take_delta(self.id)) is not None:
            actions.append(Send(delta))
        if choice.finish_reason is None:
            return actions
        if output.finish_reason is None:
            # A stop string ended it; the engine, which sees no text, would go on.
            actions.append(Abort(self.request_id, choice.index if self.num_choices > 1 else None))
        if all(choice.finish_reason is not None for choice in self._choices):
            actions += [*self._end(choice.finish_reason, abort=False), Send(self._done())]
        return actions

    def _cancelled(self) -> list[Action]:
        actions: list[Action] = []
        for choice in self._choices:
            if choice.finish_reason is None:
                choice.abort()
                if self.stream and (delta := choice.take_delta(self.id)) is not None:
                    actions.append(Send(delta))
        return [*self._end("abort", abort=True), *actions, Send(self._done())]

    def _end(self, outcome: str, *, abort: bool) -> list[Action]:
        engine_has_it = self.phase is Phase.RUNNING
        self.phase = Phase.ENDED
        self.outcome = outcome
        return [Abort(self.request_id)] if abort and engine_has_it else []

    def _done(self) -> Done:
        usage = Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            cached_tokens=self.num_cached_tokens,
        )
        # One that was cancelled before its texts were opened has as many choices as any other.
        choices = [choice.finished() for choice in self._choices] or [
            Choice(index=index, text="", token_ids=[], finish_reason="abort") for index in range(self.num_choices)
        ]
        return Done(id=self.id, request_id=self.request_id, model=self.model, choices=choices, usage=usage)


@dataclass(slots=True, eq=False)
class _ChoiceText:
    """One choice's tokens on their way to text.

    Text that may be the start of a stop string is held back. The ids and log-probabilities of a delta are all that came
    since the last one.
    """

    index: int
    detokenizer: Detokenizer
    stop_matcher: StopMatcher
    token_text: Callable[[int], str]
    min_tokens: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: LogprobList | None = None  # those that are not in deltas
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_sent_tokens: int = 0  # token_ids [0, num_sent) and texts [0, num_sent_texts) are in deltas already
    num_sent_texts: int = 0

    def push(self, output: SequenceOutput) -> None:
        for position, token_id in enumerate(output.token_ids):
            self.token_ids.append(token_id)
            if output.logprobs is not None:
                self._add_logprob(token_id, output.logprobs[position])
            is_last = position == len(output.token_ids) - 1
            if is_last and output.stop_token_id is not None:
                continue  # an id that ends the text is not part of it
            if self._push_text(self.detokenizer.push([token_id])):
                return  # tokens after the stop string count for nothing, even from the same step
        if output.finish_reason is not None and not self._flush():
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_token_id

    def abort(self) -> None:
        if not self._flush():
            self.finish_reason = "abort"

    def take_delta(self, request: str) -> Delta | None:
        """What is new since the last delta, or None while there is no text to show and no end to tell."""
        text = "".join(self.texts[self.num_sent_texts :])
        if not text and self.finish_reason is None:
            return None
        start, self.num_sent_tokens = self.num_sent_tokens, len(self.token_ids)
        self.num_sent_texts = len(self.texts)
        return Delta(
            id=request,
            index=self.index,
            text=text,
            token_ids=self.token_ids[start:],
            logprobs=None if self.logprobs is None else self.logprobs.take(),
            finish_reason=self.finish_reason,
        )

    def finished(self) -> Choice:
        return Choice(
            index=self.index,
            text="".join(self.texts),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            logprobs=None if self.logprobs is None else self.logprobs.take() or None,
        )

    def _push_text(self, text: str) -> bool:
        """Adds text, all but what a stop string may still claim. True when a stop string is complete."""
        if not text:
            return False
        if len(self.token_ids) <= self.min_tokens:
            self.texts.append(text)
            return False
        shown, matched = self.stop_matcher.push(text)
        if shown:
            self.texts.append(shown)
        if matched is None:
            return False
        self.finish_reason, self.stop_reason = "stop", matched
        return True

    def _flush(self) -> bool:
        """No token comes any more: what was held back is text after all. True when a stop string is complete."""
        if self._push_text(self.detokenizer.finish()):
            return True
        if rest := self.stop_matcher.finish():
            self.texts.append(rest)
        return False

    def _add_logprob(self, token_id: int, at: TokenLogprobs) -> None:
        if self.logprobs is None:
            self.logprobs = LogprobList(self.token_text)
        self.logprobs.append(token_id, at)
