"""A key that is taken out of its file, in a daemon that serves: it is out at once, and what goes wrong is said."""

import os
import signal
import time
from http.client import HTTPConnection
from pathlib import Path

from pagedd.client.sync import Client

from .conftest import StartDaemon


def test_a_key_that_is_taken_out_is_out_at_the_hangup_whatever_quotas_say(
    start_daemon: StartDaemon, tmp_path: Path, free_port: int
) -> None:
    file, keys = tmp_path / "pagedd.toml", tmp_path / "keys"
    ana, bob = "a" * 32, "b" * 32
    settings = f"http_port = {free_port}\napi_key_file = '{keys}'\n"
    of_ana = "[quota.key.ana]\nmax_requests = 5\n"
    keys.write_text(f"ana {ana}\nbob {bob}\n")
    file.write_text(settings + of_ana)
    daemon = start_daemon("--config", str(file), fake_engine=True).wait_ready()

    def hang_up(says: str) -> None:
        with Client(daemon.endpoints.directory) as client:
            before = [event.reason for event in client.stats().events if event.kind == "reload"]
            daemon.process.send_signal(signal.SIGHUP)
            while (now := [e.reason for e in client.stats().events if e.kind == "reload"]) == before:
                time.sleep(0.01)
        assert now == [*before, says]

    def status(key: str) -> int:
        connection = HTTPConnection("localhost", free_port, timeout=10)
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        found = connection.getresponse().status
        connection.close()
        return found

    assert [status(ana), status(bob)] == [200, 200]
    keys.write_text(f"bob {bob}\n")
    hang_up("taken over: API keys")  # its quota is still in the settings
    assert [status(ana), status(bob)] == [401, 200]
    assert "quota.key.ana: api_key_file has no key of that name" in daemon.log
    keys.write_text(f"ana {ana}\nbob {bob}\n")
    hang_up("taken over: API keys")
    keys.write_text(f"bob {bob}\n")
    file.write_text(settings)
    hang_up("taken over: quota, API keys")
    assert [status(ana), status(bob)] == [401, 200]
    keys.unlink()
    os.mkfifo(keys)  # nobody ever writes to it
    hang_up(no_keys := "API keys as before, what is there now cannot be used; the log says why")
    assert [status(ana), status(bob)] == [401, 200]
    assert any("reload: API keys as before" in line for line in daemon.notified())
    file.write_text("quota = 5\n")
    hang_up(f"the settings are wrong and stay as they are; the log says why; {no_keys}")
    assert daemon.stop() == 0
