"""What is relayed, and the text by which Ray's router finds the replica that has a prompt's beginning."""

import json

import pytest

from pagedd.scale.ask import MAX_PROMPT_CHARS, ROUTES, Ask, Head


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"prompt": "Once upon"}, "Once upon"),
        ({"prompt": ["Once upon", "a time"]}, "Once upon"),
        ({"prompt": [72, 101]}, "He"),
        ({"prompt": [[72, 101], [1]]}, "He"),
        ({"prompt": [0xD7FF, 0xD800, 0xE000, 72, -1, 2**40]}, "\ud7ff\ue000\ue800H"),
        ({"prompt": "Once", "cache_salt": "mine"}, "mine\nOnce"),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]},
            "system\nBe brief.\nuser\nHello",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "x"}]}]},
            "user\nHello",
        ),
        # What the daemon will refuse goes to any replica, which says why.
        ({"prompt": 5}, ""),
        ({"prompt": []}, ""),
        ({"messages": ["Hello"]}, ""),
        ({}, ""),
    ],
)
def test_a_prompt_is_routed_by_what_its_cached_prefix_follows_from(fields: dict[str, object], prompt: str) -> None:
    assert Ask.of("POST", "/v1/completions", json.dumps(fields).encode()).prompt == prompt


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"null", b"[" * 100_000])
def test_a_body_that_is_no_object_goes_to_any_replica(body: bytes) -> None:
    ask = Ask.of("POST", "/v1/completions", body)
    assert (ask.prompt, ask.body) == ("", body)


def test_chats_that_begin_alike_have_texts_that_begin_alike() -> None:
    def prompt(question: str) -> str:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
        return Ask.of("POST", "/v1/chat/completions", json.dumps({"messages": messages}).encode()).prompt

    assert prompt("Hello")[: len("system\nBe brief.\nuser\n")] == prompt("Bye")[: len("system\nBe brief.\nuser\n")]


def test_the_router_keeps_no_more_of_a_long_prompt_than_tells_it_apart() -> None:
    ask = Ask.of("POST", "/v1/completions", json.dumps({"prompt": "x" * 2 * MAX_PROMPT_CHARS}).encode())
    assert len(ask.prompt) == MAX_PROMPT_CHARS
    assert len(ask.body) > 2 * MAX_PROMPT_CHARS


@pytest.mark.parametrize(
    "route", [("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/metrics"), ("GET", "/v1/../sleep")]
)
def test_what_only_administrators_may_do_is_not_relayed(route: tuple[str, str]) -> None:
    assert not Ask.of(*route).is_relayed


def test_what_is_relayed_is_a_route_of_the_daemon() -> None:
    from pagedd.daemon.http_routes import ROUTES as DAEMON_ROUTES

    assert {(route.method, route.path) for route in DAEMON_ROUTES} > ROUTES


def test_a_head_says_when_to_come_again_and_who_answers() -> None:
    assert Head(200, "application/json", None, "box/7").headers == {
        "Content-Type": "application/json",
        "X-Pagedd-Replica": "box/7",
    }
    assert Head(503, "application/json", "2", "box/7").headers["Retry-After"] == "2"
