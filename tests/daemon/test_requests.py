"""The life of one request, event by event: what its owner is told to do."""

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedd.client.protocol import Accepted, Choice, Delta, Done, Failed, TokenLogprob, Usage
from pagedd.daemon.logprob_list import LogprobList
from pagedd.daemon.requests import (
    Abort,
    Action,
    Admitted,
    Broken,
    Cancelled,
    ClientGone,
    LiveRequest,
    Phase,
    Produced,
    Send,
    Submit,
)
from pagedd.daemon.text.tokenizer import TextTokenizer
from pagedd.engine.request import Request, SequenceOutput, TokenLogprobs
from pagedd.engine.sampling_params import SamplingParams

from .byte_model import EOS, write_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(write_model(tmp_path_factory.mktemp("model")))


def engine_request(n: int = 1) -> Request:
    return Request(request_id="r1", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=8, n=n))


def running(tokenizer: TextTokenizer, *, n: int = 1, **fields: object) -> LiveRequest:
    live = LiveRequest(id="a", request_id="r1", model="m", num_choices=n, **fields)  # type: ignore[arg-type]
    live.open_texts(tokenizer)
    live.handle(Admitted(engine_request(n), "m"))
    return live


def produced(ids: bytes | list[int], index: int = 0, **fields: object) -> Produced:
    return Produced(SequenceOutput(request_id="r1", choice_index=index, token_ids=list(ids), **fields))  # type: ignore[arg-type]


def done(*choices: Choice, tokens: int, cached: int = 0) -> Send:
    usage = Usage(prompt_tokens=3, completion_tokens=tokens, cached_tokens=cached)
    return Send(Done(id="a", request_id="r1", model="m", choices=list(choices), usage=usage))


def test_an_admitted_request_goes_to_the_engine_before_its_client_hears_that_it_was_accepted(
    tokenizer: TextTokenizer,
) -> None:
    live = LiveRequest(id="a", request_id="r1", model="m")
    live.open_texts(tokenizer)
    request = engine_request()
    assert live.handle(Admitted(request, "m")) == [Submit(request), Send(Accepted(id="a", request_id="r1"))]
    assert live.phase is Phase.RUNNING


def test_tokens_become_deltas_and_the_last_one_done(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer)
    assert live.handle(produced(b"He", num_cached_tokens=2)) == [Send(Delta(id="a", text="He", token_ids=[72, 101]))]
    assert live.handle(produced(b"y", finish_reason="length")) == [
        Send(Delta(id="a", text="y", token_ids=[121], finish_reason="length")),
        done(Choice(index=0, text="Hey", token_ids=[72, 101, 121], finish_reason="length"), tokens=3, cached=2),
    ]
    assert live.has_ended
    assert live.outcome == "length"


def test_without_streaming_everything_comes_with_done(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer, stream=False)
    assert live.handle(produced(b"He")) == []
    assert live.handle(produced(b"y", finish_reason="length")) == [
        done(Choice(index=0, text="Hey", token_ids=[72, 101, 121], finish_reason="length"), tokens=3)
    ]


def test_the_id_that_ends_a_text_counts_but_is_not_part_of_it(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer)
    ended = live.handle(produced([72, EOS], finish_reason="stop", stop_token_id=EOS))
    choice = Choice(index=0, text="H", token_ids=[72, EOS], finish_reason="stop", stop_reason=EOS)
    assert ended[-1] == done(choice, tokens=2)


def test_a_character_in_pieces_is_held_until_it_is_whole(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer)
    first, second, third = "世".encode()
    assert live.handle(produced([first])) == []
    assert live.handle(produced([second])) == []
    assert live.handle(produced([third])) == [Send(Delta(id="a", text="世", token_ids=[first, second, third]))]


def test_a_text_that_ends_inside_a_character_shows_that_it_was_cut(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer)
    ended = live.handle(produced("世".encode()[:2], finish_reason="length"))
    assert isinstance(ended[0], Send)
    assert ended[0].message == Delta(id="a", text="\ufffd", token_ids=[0xE4, 0xB8], finish_reason="length")


def test_a_stop_string_ends_the_text_before_it_and_tells_the_engine(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer, stop=["DEFGHIJ"])
    assert live.handle(produced(b"ABCDEF")) == [Send(Delta(id="a", text="ABC", token_ids=list(b"ABCDEF")))]
    assert live.handle(produced(b"G")) == []
    assert live.handle(produced(b"HI")) == []
    assert live.handle(produced(b"J")) == [
        Send(Delta(id="a", text="", token_ids=list(b"GHIJ"), finish_reason="stop")),
        Abort("r1"),
        done(
            Choice(index=0, text="ABC", token_ids=list(b"ABCDEFGHIJ"), finish_reason="stop", stop_reason="DEFGHIJ"),
            tokens=10,
        ),
    ]


def test_tokens_after_a_stop_string_in_the_same_step_count_for_nothing(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer, stop=["b"], stream=False)
    assert live.handle(produced(b"abc")) == [
        Abort("r1"),
        done(Choice(index=0, text="a", token_ids=[97, 98], finish_reason="stop", stop_reason="b"), tokens=2),
    ]


def test_the_beginning_of_a_stop_string_at_the_end_is_text(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer, stop=["assistant"], stream=False)
    live.handle(produced(b"ple"))
    assert live.handle(produced(b"as", finish_reason="length"))[-1] == done(
        Choice(index=0, text="pleas", token_ids=list(b"pleas"), finish_reason="length"), tokens=5
    )


def test_an_engine_that_ends_on_the_token_that_completes_a_stop_string_is_not_told_again(
    tokenizer: TextTokenizer,
) -> None:
    live = running(tokenizer, stop=["b"], stream=False)
    assert live.handle(produced(b"ab", finish_reason="length")) == [
        done(Choice(index=0, text="a", token_ids=[97, 98], finish_reason="stop", stop_reason="b"), tokens=2)
    ]


def test_a_stop_string_does_not_count_before_min_tokens(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer, stop=["x"], min_tokens=2, stream=False)
    assert live.handle(produced(b"xx")) == []
    assert live.handle(produced(b"yx"))[-1] == done(
        Choice(index=0, text="xxy", token_ids=list(b"xxyx"), finish_reason="stop", stop_reason="x"), tokens=4
    )


def test_a_choice_that_hit_its_stop_string_ends_alone(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer, n=2, stop=["!"], stream=False)
    assert live.handle(produced(b"a!", index=0)) == [Abort("r1", 0)]
    assert live.handle(produced(b"z", index=0)) == []  # was on its way already
    assert live.handle(produced(b"bc", index=1, finish_reason="length")) == [
        done(
            Choice(index=0, text="a", token_ids=[97, 33], finish_reason="stop", stop_reason="!"),
            Choice(index=1, text="bc", token_ids=[98, 99], finish_reason="length"),
            tokens=4,
        )
    ]


def test_log_probabilities_come_with_the_text_they_belong_to(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer, stop=["ab"])
    at = [TokenLogprobs(logprob=-0.5, top=[(97, -0.5), (98, -1.5)])]
    assert live.handle(produced(b"a", logprobs=at)) == []
    first = TokenLogprob(token_id=97, token="a", logprob=-0.5, top=[(97, "a", -0.5), (98, "b", -1.5)])
    second = TokenLogprob(token_id=99, token="c", logprob=-2.0)
    assert live.handle(produced(b"c", logprobs=[TokenLogprobs(logprob=-2.0)])) == [
        Send(Delta(id="a", text="ac", token_ids=[97, 99], logprobs=[first, second]))
    ]
    end = live.handle(produced(b"c", logprobs=[TokenLogprobs(logprob=-2.0)], finish_reason="length"))
    choice = Choice(index=0, text="acc", token_ids=[97, 99, 99], finish_reason="length")
    # What a stream has told is not told again.
    assert end == [
        Send(Delta(id="a", text="c", token_ids=[99], logprobs=[second], finish_reason="length")),
        done(choice, tokens=3),
    ]


def test_log_probabilities_of_a_whole_answer_come_with_its_end(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer, stream=False)
    assert live.handle(produced(b"a", logprobs=[TokenLogprobs(logprob=-0.5, top=[(98, -1.5)])])) == []
    first = TokenLogprob(token_id=97, token="a", logprob=-0.5, top=[(98, "b", -1.5)])
    second = TokenLogprob(token_id=99, token="c", logprob=-2.0)
    choice = Choice(index=0, text="ac", token_ids=[97, 99], finish_reason="length", logprobs=[first, second])
    end = produced(b"c", logprobs=[TokenLogprobs(logprob=-2.0)], finish_reason="length")
    assert live.handle(end) == [done(choice, tokens=2)]


def test_log_probabilities_take_few_bytes_until_they_are_sent() -> None:
    kept = LogprobList(chr)
    tracemalloc.start()
    for number in range(1000):
        kept.append(65, TokenLogprobs(logprob=-number / 3, top=[(66, -number / (5 + k)) for k in range(20)]))
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 1000 * 21 * 16
    assert len(kept.take()) == 1000
    assert kept.take() == []


def test_cancelling_gives_what_there_is_and_tells_the_engine(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer, stop=["bcd"])
    live.handle(produced(b"ab"))
    assert live.handle(Cancelled()) == [
        Abort("r1"),
        Send(Delta(id="a", text="b", token_ids=[], finish_reason="abort")),
        done(Choice(index=0, text="ab", token_ids=[97, 98], finish_reason="abort"), tokens=2),
    ]


def test_a_client_that_is_gone_hears_nothing_and_the_engine_is_told(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer)
    assert live.handle(ClientGone()) == [Abort("r1")]
    assert live.has_ended


@pytest.mark.parametrize("event", [Cancelled(), ClientGone(), Broken("queue_full", "…")])
def test_the_engine_is_not_told_about_a_request_that_it_never_had(event: Cancelled | ClientGone | Broken) -> None:
    live = LiveRequest(id="a", request_id="r1", model="m")
    assert not any(isinstance(action, Abort | Submit) for action in live.handle(event))
    assert live.handle(Admitted(engine_request(), "m")) == []


def test_a_refusal_names_code_field_and_request() -> None:
    live = LiveRequest(id="a", request_id="r1", model="m")
    assert live.handle(Broken("invalid_value", "top_p = 2", "top_p")) == [
        Send(Failed(id="a", code="invalid_value", message="top_p = 2", field="top_p", request_id="r1"))
    ]


def test_one_broken_choice_ends_its_request(tokenizer: TextTokenizer) -> None:
    live = running(tokenizer, n=2)
    broken = produced([], index=1, finish_reason="error", error_code="nan_logits", error_message="not finite")
    assert live.handle(broken) == [
        Abort("r1"),
        Send(Failed(id="a", code="nan_logits", message="not finite", request_id="r1")),
    ]


EVENTS = st.one_of(
    st.builds(
        produced,
        st.binary(min_size=1, max_size=3),
        index=st.integers(0, 1),
        finish_reason=st.sampled_from([None, None, None, "length", "stop", "error"]),
    ),
    st.just(Cancelled()),
    st.just(ClientGone()),
    st.just(Broken("engine_died", "it died")),
)


@settings(max_examples=300, deadline=None)
@given(events=st.lists(EVENTS, max_size=25), stream=st.booleans(), stop=st.sampled_from([[], ["a"], ["ab", "\x00"]]))
def test_whatever_happens_there_is_one_terminal_message_and_the_deltas_are_its_texts(
    tokenizer: TextTokenizer, events: list[Produced | Cancelled | ClientGone | Broken], stream: bool, stop: list[str]
) -> None:
    live = running(tokenizer, n=2, stream=stream, stop=stop)
    actions: list[Action] = []
    # The engine says nothing more of a choice that it ended.
    ended: set[int] = set()
    for event in events:
        if isinstance(event, Produced):
            if event.output.choice_index in ended:
                continue
            if event.output.finish_reason is not None:
                ended.add(event.output.choice_index)
        actions += live.handle(event)
    sent = [action.message for action in actions if isinstance(action, Send)]
    terminal = [message for message in sent if isinstance(message, Done | Failed)]
    was_left = any(isinstance(event, ClientGone) for event in events)
    assert len(terminal) == 1 if live.has_ended and not was_left else len(terminal) <= 1
    assert sent[-1:] == terminal or not terminal
    if terminal and isinstance(terminal[0], Done) and stream:
        for choice in terminal[0].choices:
            deltas = [message for message in sent if isinstance(message, Delta) and message.index == choice.index]
            assert "".join(delta.text for delta in deltas) == choice.text
            assert [token_id for delta in deltas for token_id in delta.token_ids] == choice.token_ids
            assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [choice.finish_reason]
            for stopped in stop:
                assert stopped not in choice.text


def test_the_model_folder_of_these_tests_maps_ids_to_bytes(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(write_model(tmp_path))
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
