"""Streams of HTTP that go wrong in the daemon itself. All others: `test_http_api.py`."""

from pathlib import Path
from typing import Any

import pytest

from pagedd.daemon.openai_responses import AnswerWriter

from .served import serving
from .waiting import until


async def test_a_fault_in_the_middle_of_a_stream_is_an_event_and_not_a_second_answer(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = AnswerWriter.chunk

    def broken(writer: AnswerWriter, number: int, delta: Any) -> bytes:
        if delta.text == "l":
            raise RuntimeError("scripted fault")
        return write(writer, number, delta)

    monkeypatch.setattr(AnswerWriter, "chunk", broken)
    async with serving(socket_folder) as served:
        first, second, error = await served.events("/v1/completions", {"prompt": "a", "stream": True})
        assert [first["choices"][0]["text"], second["choices"][0]["text"]] == ["H", "e"]
        assert error["error"]["code"] == "internal"
        await until(lambda: not served.host.live)
