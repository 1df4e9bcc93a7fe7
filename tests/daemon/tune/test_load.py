"""Loads: a recorded log, what is wrong in it, and users who ask for it."""

from pathlib import Path

import pytest

from pagedd.client import request_log
from pagedd.client.errors import PageddError
from pagedd.client.request_log import LoggedRequest, read_log
from pagedd.daemon.tune.load import SYSTEM_TOKENS, make_users, synthetic_load


def test_a_log_may_have_ids_or_lengths(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"prompt_token_ids": [1, 2], "output_tokens": 3}\n\n{"prompt_tokens": 5, "output_tokens": 4}\n')
    assert read_log(log, "file") == [
        LoggedRequest(prompt_token_ids=[1, 2], output_tokens=3),
        LoggedRequest(prompt_tokens=5, output_tokens=4),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt_tokens": 5, "output_tokens": 4}\nnonsense', "line 2: JSON is malformed"),
        ('{"prompt_tokens": 5, "output_tokens": 0}', "line 1: output_tokens and the prompt"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "system_tokens": -1}', "line 1: .* system_tokens at least 0"),
        ('{"prompt": "Hello", "output_tokens": 1}', "line 1: Object contains unknown field `prompt`"),
        ("\n", "holds no request"),
    ],
)
def test_a_wrong_log_is_refused_with_the_line(tmp_path: Path, text: str, said: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    with pytest.raises(PageddError, match=said):
        read_log(log, "file")


def test_a_log_without_end_is_refused_and_not_read_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PageddError, match="/dev/zero, line 1: a log has at most"):
        read_log(Path("/dev/zero"), "file")
    monkeypatch.setattr(request_log, "_MAX_LINES", 3)
    log = tmp_path / "log"
    log.write_text('{"prompt_tokens": 5, "output_tokens": 4}\n' * 3)
    assert len(read_log(log, "file")) == 3
    log.write_text('{"prompt_tokens": 5, "output_tokens": 4}\n' * 4)
    with pytest.raises(PageddError, match="line 4: a log has at most 3 lines"):
        read_log(log, "file")
    log.write_text('{"prompt_tokens": 5, "output_tokens": 4}\n' * 3)
    monkeypatch.setattr(request_log, "_MAX_BYTES", 2 * 41)
    with pytest.raises(PageddError, match=r"line 3: a log has at most .*, 82 in all; give a part of it"):
        read_log(log, "file")


def test_chats_share_their_system_prompt_and_nothing_else() -> None:
    [user] = make_users(synthetic_load(), 1, vocab_size=1000, max_request_tokens=2000)
    first, second = next(user), user.send([])
    assert first.prompt_token_ids[:SYSTEM_TOKENS] == second.prompt_token_ids[:SYSTEM_TOKENS]
    assert first.prompt_token_ids[SYSTEM_TOKENS:][:32] != second.prompt_token_ids[SYSTEM_TOKENS:][:32]


def test_users_take_the_log_in_turn_cut_to_what_can_be_served() -> None:
    load = [
        LoggedRequest(prompt_token_ids=[7] * 30, output_tokens=50),
        LoggedRequest(prompt_token_ids=[8, 1005], output_tokens=2),
    ]
    one, two = make_users(load, 2, vocab_size=1000, max_request_tokens=20)
    long, short = next(one), next(two)
    assert (len(long.prompt_token_ids), long.num_output_tokens) == (19, 1)
    assert (short.prompt_token_ids, short.num_output_tokens) == ([8, 5], 2)
    assert len(one.send([]).prompt_token_ids) == 19


def test_lengths_beyond_all_bounds_cost_no_more_than_what_can_be_served() -> None:
    load = [LoggedRequest(prompt_tokens=10**15, system_tokens=10**15, output_tokens=10**15)]
    [user] = make_users(load, 1, vocab_size=1000, max_request_tokens=20)
    asked = next(user)
    assert (len(asked.prompt_token_ids), asked.num_output_tokens) == (19, 1)
