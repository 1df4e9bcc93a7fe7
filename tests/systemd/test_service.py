"""`systemctl start pagedd`, under a real systemd."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
Machine = Any


@pytest.fixture(scope="module")
def service(machine: Machine, model_gguf: Path) -> Machine:
    """The machine with pagedd installed by `make install` and the test's model in its settings."""
    for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix), model_gguf):
        machine.open_to_everyone(path)
    machine.run("make", "-C", str(ROOT), "install", f"INSTALL_VENV={sys.prefix}")
    # The tests' interpreter and model may be in places that the unit hides.
    machine.write("/etc/systemd/system/pagedd.service.d/test.conf", "[Service]\nProtectHome=no\nPrivateTmp=no\n")
    machine.run("systemctl", "daemon-reload")
    machine.write("/etc/pagedd/pagedd.toml", settings(model_gguf))
    return machine


def settings(model: Path) -> str:
    return f'model = "{model}"\nnum_blocks = 64\nmax_model_len = 512\n'


def test_the_service_starts_serves_its_group_and_stops(service: Machine) -> None:
    # It compiles its kernels.
    started = service.run("systemctl", "start", "pagedd", check=False, timeout_s=250)
    assert started.returncode == 0, service.run("journalctl", "--no-pager", "-u", "pagedd").stdout
    assert service.show("pagedd", "ActiveState") == "active"
    assert service.show("pagedd", "StatusText")

    modes = service.run("stat", "-c", "%a %U:%G %n", "/run/pagedd", *sockets("pagedd", "http", "stats", "admin")).stdout
    assert modes.splitlines() == [
        "750 pagedd:pagedd /run/pagedd",
        "660 pagedd:pagedd /run/pagedd/pagedd.sock",
        "660 pagedd:pagedd /run/pagedd/http.sock",
        "660 pagedd:pagedd /run/pagedd/stats.sock",
        "600 pagedd:pagedd /run/pagedd/admin.sock",
    ]

    ask = ("pagectl", "generate", "The capital of France is", "--max-tokens", "8", "--temperature", "0")
    assert "Paris" in service.run(*ask).stdout
    member = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--groups=pagedd")
    assert json.loads(service.run(*member, *ask, "--json").stdout)["usage"]["completion_tokens"] == 8
    stranger = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
    refused = service.run(*stranger, *ask, check=False)
    assert refused.returncode == 77
    assert "join the group pagedd" in refused.stderr

    over_http = ("curl", "--silent", "--unix-socket", "/run/pagedd/http.sock", "http://localhost/v1/completions")
    over_http += ("--header", "Content-Type: application/json", "--data", '{"prompt": "Hello", "max_tokens": 2}')
    for who in ((), member):
        assert json.loads(service.run(*who, *over_http).stdout)["usage"]["completion_tokens"] == 2
    assert service.run(*stranger, *over_http, check=False).returncode == 7  # curl could not connect

    # Each socket takes and refuses by its mode.
    for name, who, is_open in (
        ("stats", member, True),
        ("stats", stranger, False),
        ("admin", (), True),
        ("admin", member, False),
        ("admin", stranger, False),
    ):
        connect = f"import socket; socket.socket(socket.AF_UNIX).connect('/run/pagedd/{name}.sock')"
        python = ("/opt/pagedd/bin/python", "-c", connect)
        assert (service.run(*who, *python, check=False).returncode == 0) is is_open, (name, who)

    cgroup = service.show("pagedd", "ControlGroup")
    service.run("systemctl", "stop", "pagedd")
    assert service.show("pagedd", "ActiveState") == "inactive"
    assert service.show("pagedd", "Result") == "success"
    assert service.show("pagedd", "ExecMainStatus") == "0"
    assert service.run("test", "-e", f"/sys/fs/cgroup{cgroup}", check=False).returncode == 1  # no process is left
    assert service.run("ls", "/run/pagedd").stdout == "pagedd.lock\n"


def sockets(*names: str) -> list[str]:
    return [f"/run/pagedd/{name}.sock" for name in names]


def test_a_wrong_setting_is_said_and_not_tried_again(service: Machine, model_gguf: Path) -> None:
    service.write("/etc/pagedd/pagedd.toml", "block_sise = 16\n")
    try:
        assert service.run("systemctl", "start", "pagedd", check=False).returncode != 0
        assert service.show("pagedd", "ActiveState") == "failed"
        assert service.show("pagedd", "ExecMainStatus") == "78"
        assert service.show("pagedd", "NRestarts") == "0"
        assert "did you mean block_size?" in service.run("journalctl", "--no-pager", "-u", "pagedd").stdout
    finally:
        service.write("/etc/pagedd/pagedd.toml", settings(model_gguf))
        service.run("systemctl", "reset-failed", "pagedd")


def test_the_front_that_is_killed_is_started_again_and_so_is_the_engine(
    service: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    service.run("systemctl", "start", "pagedd", timeout_s=120)
    with capsys.disabled():
        print(f"\nfrom systemctl start to READY, kernels and model at hand: {start_s(service):.1f} s")
    front, engine = service.show("pagedd", "MainPID"), engine_pid(service)
    service.run("kill", "-KILL", engine)
    service.run("sh", "-c", "until pagectl generate Hello --max-tokens 2; do sleep 0.2; done", timeout_s=60)
    assert service.show("pagedd", "MainPID") == front
    assert service.show("pagedd", "NRestarts") == "0"
    reports = service.run("sh", "-c", "cat /var/lib/pagedd/crashes/*").stdout
    assert f"(pid {engine}) was ended by SIGKILL" in reports

    service.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "pagedd")
    wait_for(service, "NRestarts", "1")
    wait_for(service, "ActiveState", "active")
    service.run("pagectl", "generate", "Hello", "--max-tokens", "2")
    front = service.show("pagedd", "MainPID")
    service.run("systemctl", "restart", "pagedd", timeout_s=120)
    assert service.show("pagedd", "MainPID") != front
    service.run("pagectl", "generate", "Hello", "--max-tokens", "2")
    service.run("systemctl", "stop", "pagedd")


def test_a_reload_takes_over_quotas_and_a_wrong_file_changes_nothing(service: Machine, model_gguf: Path) -> None:
    service.run("systemctl", "start", "pagedd", timeout_s=120)
    front = service.show("pagedd", "MainPID")
    ask = ("pagectl", "generate", "Hello", "--max-tokens", "20")
    try:
        service.write("/etc/pagedd/pagedd.toml", settings(model_gguf) + "[quota]\ntokens_per_minute = 10\n")
        service.run("systemctl", "reload", "pagedd")
        wait_for_log(service, "reloaded: quota")
        assert "exceeds_quota" in service.run(*ask, check=False).stderr

        service.write("/etc/pagedd/pagedd.toml", "block_sise = 16\n")
        service.run("systemctl", "reload", "pagedd")
        wait_for_log(service, "nothing is reloaded, the settings stay as they are")
        assert service.run(*ask, check=False).returncode != 0
    finally:
        service.write("/etc/pagedd/pagedd.toml", settings(model_gguf))
    service.run("systemctl", "reload", "pagedd")
    service.run("sh", "-c", f"until {shlex.join(ask)}; do sleep 0.2; done")
    assert service.show("pagedd", "MainPID") == front
    assert service.show("pagedd", "ActiveState") == "active"
    service.run("systemctl", "stop", "pagedd")


def wait_for_log(service: Machine, words: str) -> None:
    service.run("sh", "-c", f"until journalctl --no-pager -u pagedd | grep -F {shlex.quote(words)}; do sleep 0.1; done")


def test_a_stop_during_the_load_leaves_nothing_behind(service: Machine) -> None:
    service.run("systemctl", "start", "--no-block", "pagedd")
    service.run("sh", "-c", "until pgrep -f daemon.engine_process; do sleep 0.05; done")
    service.run("systemctl", "stop", "pagedd", timeout_s=10)
    assert service.show("pagedd", "ActiveState") == "inactive"
    assert service.show("pagedd", "Result") == "success"
    assert service.run("pgrep", "-u", "pagedd", check=False).returncode == 1


def test_the_first_client_starts_a_daemon_whose_sockets_systemd_holds(service: Machine) -> None:
    service.run("systemctl", "start", "pagedd.socket")
    member = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--groups=pagedd")
    health = ("curl", "--silent", "--unix-socket", "/run/pagedd/http.sock", "http://localhost/health")
    assert service.show("pagedd", "ActiveState") == "inactive"
    assert json.loads(service.run(*member, *health).stdout)["status"] == "live"
    wait_for(service, "ActiveState", "active")
    service.run(*member, "pagectl", "generate", "Hello", "--max-tokens", "2")
    modes = service.run("stat", "-c", "%a %U:%G %n", "/run/pagedd", *sockets("pagedd", "http", "stats", "admin")).stdout
    assert modes.splitlines() == [
        "750 pagedd:pagedd /run/pagedd",
        *(f"660 pagedd:pagedd {path}" for path in sockets("pagedd", "http", "stats")),
        *(f"600 pagedd:pagedd {path}" for path in sockets("admin")),
    ]

    # The sockets outlive it, and start the next one.
    service.run("systemctl", "stop", "pagedd")
    ask = "until pagectl generate Hello --max-tokens 2; do sleep 0.2; done"
    service.run(*member, "sh", "-c", ask, timeout_s=120)
    assert service.show("pagedd", "ActiveState") == "active"
    service.run("systemctl", "stop", "pagedd.socket", "pagedd")


def start_s(service: Machine) -> float:
    """How long the last start took, by systemd's own clock."""
    began, ready = (
        int(service.show("pagedd", f"{moment}TimestampMonotonic")) for moment in ("InactiveExit", "ActiveEnter")
    )
    return (ready - began) / 1e6


def wait_for(service: Machine, name: str, value: str) -> None:
    service.run("sh", "-c", f'until [ "$(systemctl show --value -p {name} pagedd)" = "{value}" ]; do sleep 0.1; done')


def engine_pid(service: Machine) -> str:
    front = service.show("pagedd", "MainPID")
    return str(service.run("pgrep", "-P", front, "-f", "daemon.engine_process").stdout.strip())


def test_an_engine_that_stands_still_is_replaced_by_the_front_and_a_front_by_systemd(
    service: Machine, model_gguf: Path
) -> None:
    service.write("/etc/pagedd/pagedd.toml", settings(model_gguf) + "step_timeout_seconds = 5\n")
    service.write("/etc/systemd/system/pagedd.service.d/watchdog.conf", "[Service]\nWatchdogSec=4\n")
    service.run("systemctl", "daemon-reload")
    service.run("systemctl", "start", "pagedd", timeout_s=120)
    front, engine = service.show("pagedd", "MainPID"), engine_pid(service)
    service.run("kill", "-STOP", engine)
    service.run("sh", "-c", f"while kill -0 {engine} 2>/dev/null; do sleep 0.1; done", timeout_s=30)
    service.run("sh", "-c", "until pagectl generate Hello --max-tokens 2; do sleep 0.2; done", timeout_s=60)
    assert service.show("pagedd", "MainPID") == front

    service.run("kill", "-STOP", front)
    wait_for(service, "Result", "watchdog")
    wait_for(service, "ActiveState", "active")
    assert service.show("pagedd", "MainPID") != front
    service.run("pagectl", "generate", "Hello", "--max-tokens", "2")
    service.run("systemctl", "stop", "pagedd")
    service.write("/etc/pagedd/pagedd.toml", settings(model_gguf))
    service.run("rm", "/etc/systemd/system/pagedd.service.d/watchdog.conf")
    service.run("systemctl", "daemon-reload")


def test_a_user_has_a_daemon_of_their_own(service: Machine) -> None:
    service.run("useradd", "--create-home", "ana")
    uid = service.run("id", "--user", "ana").stdout.strip()
    # As if she had started it before: compiling takes half a minute.
    service.run("mkdir", "-p", "/home/ana/.cache/pagedd")
    service.run("cp", "-R", "/var/cache/pagedd/kernels", "/home/ana/.cache/pagedd")
    service.run("chown", "-R", "ana:ana", "/home/ana/.cache")
    service.run("systemctl", "start", f"user@{uid}")
    as_ana = ("setpriv", "--reuid=ana", "--regid=ana", "--clear-groups")
    as_ana += ("env", "HOME=/home/ana", f"XDG_RUNTIME_DIR=/run/user/{uid}")

    service.run(*as_ana, "systemctl", "--user", "start", "pagedd", timeout_s=120)
    ask = ("pagectl", "generate", "The capital of France is", "--max-tokens", "8", "--temperature", "0")
    assert "Paris" in service.run(*as_ana, *ask).stdout
    place = f"/run/user/{uid}/pagedd"
    assert service.run("stat", "-c", "%a %U", place, f"{place}/http.sock").stdout.splitlines() == ["700 ana", "660 ana"]
    service.run(*as_ana, "systemctl", "--user", "stop", "pagedd")
    state = service.run(*as_ana, "systemctl", "--user", "show", "--property=ActiveState,Result", "pagedd").stdout
    assert state.split() == ["Result=success", "ActiveState=inactive"]
    assert service.run("pgrep", "-u", "ana", "-f", "pagedd", check=False).returncode == 1
    service.run("systemctl", "stop", f"user@{uid}")


def test_uninstalling_keeps_settings_and_nothing_else_of_the_program(service: Machine) -> None:
    service.run("make", "-C", str(ROOT), "uninstall")
    assert service.run("systemctl", "cat", "pagedd", check=False).returncode != 0
    everywhere = "/opt/pagedd /usr/local/bin/page* /usr/local/share/*/*/*page* /etc/pagedd/pagedd.toml"
    left = service.run("sh", "-c", f"ls -d {everywhere}", check=False).stdout
    assert left.split() == ["/etc/pagedd/pagedd.toml"]
