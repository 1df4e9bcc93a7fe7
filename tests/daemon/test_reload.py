"""Reloading: what can be taken over is, what cannot is named, and a wrong file changes nothing."""

import logging
from dataclasses import replace

import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.quota_config import QuotaConfig
from pagedd.daemon.reload import Reloader

STRICT = DaemonConfig(quota=QuotaConfig(max_requests=1))


class Source:
    """Settings as they will be read; an error is raised."""

    def __init__(self) -> None:
        self.next: DaemonConfig | Exception = DaemonConfig()
        self.taken: list[DaemonConfig] = []
        self.reloader = Reloader(DaemonConfig(), self.read, {"quota": self.taken.append})

    def read(self) -> DaemonConfig:
        if isinstance(self.next, Exception):
            raise self.next
        return self.next


def test_what_can_be_taken_over_is_once(caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    source.next = STRICT
    with caplog.at_level(logging.INFO):
        assert source.reloader.reload() == ["quota"]
        assert source.reloader.reload() == []
    assert source.taken == [STRICT]
    assert source.reloader.config == STRICT
    assert [record.getMessage() for record in caplog.records] == [
        "reloaded: quota",
        "reloaded: nothing has changed that can be",
    ]


def test_what_needs_a_restart_is_named_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    source.next = replace(STRICT, block_size=8, max_num_seqs=4)
    assert source.reloader.reload() == ["quota"]
    assert source.reloader.config == STRICT
    assert "a restart is needed for: block_size, max_num_seqs" in caplog.text


@pytest.mark.parametrize(
    "error", [PageddError("invalid_setting", "block_size = 9: it is 8, 16 or 32"), RuntimeError("a disk that is lost")]
)
def test_a_wrong_file_changes_nothing_and_says_so(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    source.next = error
    assert source.reloader.reload() is None
    assert source.taken == []
    assert "the settings stay as they are" in caplog.text
    assert str(error) in caplog.text
