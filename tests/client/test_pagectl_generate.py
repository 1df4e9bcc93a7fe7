"""`pagectl generate` as a person or a script meets it: prompts, flags, answers, and its end in the middle of one."""

import json
import signal
import subprocess
from typing import Any

import pytest

from pagedd.client import pagectl
from pagedd.client.protocol import Cancel, Delta, Generate, Sampling

from .fake_daemon import FakeDaemon
from .pagectl_calls import Run, Start, type_in


def test_every_sampling_flag_is_a_field_of_the_protocol() -> None:
    assert {flag.field for flag in pagectl.SAMPLING_FLAGS} <= set(Sampling.__struct_fields__)


def test_generate_prints_the_text_as_it_comes(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "count", "--max-tokens", "3", "--temperature", "0", "--top-p", "0.9") == 0
    assert capsys.readouterr().out == "one two three\n"
    asked = daemon.hear(Generate)
    assert (asked.prompt, asked.stream) == ("count", True)
    assert asked.sampling == Sampling(max_tokens=3, temperature=0.0, top_p=0.9)


def test_generate_carries_every_flag(daemon: FakeDaemon, run: Run) -> None:
    flags = "--seed 7 --stop . --stop END --no-stream --priority -5 --model tiny --ignore-eos --min-p 0.1 --top-k 4"
    assert run("generate", "x", *flags.split()) == 0
    asked = daemon.hear(Generate)
    assert (asked.stream, asked.priority, asked.model) == (False, -5, "tiny")
    assert asked.sampling == Sampling(seed=7, stop=[".", "END"], ignore_eos=True, min_p=0.1, top_k=4)


def test_generate_json_is_one_object_with_texts_ids_and_usage(
    daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "x", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["choices"][0]["text"] == "one two three"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0}
    assert daemon.hear(Generate).stream is False


def test_several_answers_are_told_apart(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(message: Generate) -> list[Any]:
        done = daemon.default_answer(message)[-1]
        second = type(done.choices[0])(index=1, text="uno", token_ids=[1], finish_reason="stop")
        done.choices.append(second)
        return [done]

    daemon.answer = answer
    assert run("generate", "x", "--n", "2") == 0
    assert capsys.readouterr().out == "--- 0\none two three\n--- 1\nuno\n"
    asked = daemon.hear(Generate)
    assert (asked.sampling.n, asked.stream) == (2, False)


@pytest.mark.parametrize("flags", [[], ["--no-stream"], ["--json"]])
def test_an_answer_that_somebody_cancelled_is_not_taken_for_a_whole_one(
    daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    def answer(message: Generate) -> list[Any]:
        *deltas, done = daemon.default_answer(message)
        done.choices[0].finish_reason = "abort"
        return [*deltas, done]

    daemon.answer = answer
    assert run("generate", "x", *flags) == 1
    printed = capsys.readouterr()
    assert "one two three" in printed.out
    assert printed.err == "pagectl: the request was cancelled; the answer is not whole\n"


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "-"]])
def test_the_prompt_can_come_from_standard_input(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    type_in(monkeypatch, "two\nlines 世\n")
    assert run(*arguments) == 0
    assert daemon.hear(Generate).prompt == "two\nlines 世\n"


def test_a_prompt_that_is_not_utf8_arrives_readable(daemon: FakeDaemon, start: Start) -> None:
    process = start("generate", b"caf\xe9", stdout=subprocess.DEVNULL)
    assert daemon.hear(Generate).prompt == "caf\ufffd"
    assert process.wait(60) == 0


def test_interrupting_a_generation_cancels_it(daemon: FakeDaemon, start: Start) -> None:
    daemon.answer = lambda message: [Delta(id=message.id, text="a")] if isinstance(message, Generate) else []
    process = start("generate", "x", stdout=subprocess.PIPE)
    assert process.stdout.read(1) == b"a"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert daemon.hear(Cancel).target == "1"  # a client counts its requests


def test_a_reader_that_leaves_ends_the_generation_quietly(daemon: FakeDaemon, start: Start) -> None:
    daemon.answer = lambda message: [Delta(id=message.id, text="a")] if isinstance(message, Generate) else []
    process = start("generate", "x", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1) == b"a"
    process.stdout.close()
    daemon.say(Delta(id="1", text="b"))
    assert process.wait(60) == 141
    assert process.stderr.read() == b""
    daemon.hear(Cancel)
