"""TLS on the TCP port: who gets through, what its files must be, and their renewal under way."""

import asyncio
import os
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import uvloop

from pagedd.client.errors import PageddError
from pagedd.daemon import http_api, tls_server
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.tls_certificate import TlsCertificate

from .served import Served, serving
from .waiting import until

KEY = "first-key"
Run = Callable[[Coroutine[Any, Any, None]], None]


class Pair(NamedTuple):
    cert: Path
    key: Path


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def make_pair(folder: Path, name: str = "localhost") -> Pair:
    """A certificate that signs itself, for two days, and its key."""
    folder.mkdir(exist_ok=True)
    pair = Pair(folder / "cert.pem", folder / "key.pem")
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
        *("-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-keyout", pair.key, "-out", pair.cert),
    )
    return pair


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def pair(made: Pair, tmp_path: Path) -> Pair:
    """Files of this test's own."""
    mine = Pair(tmp_path / "cert.pem", tmp_path / "key.pem")
    for theirs, own in zip(made, mine, strict=True):
        own.write_bytes(theirs.read_bytes())
        own.chmod(0o600)
    return mine


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    made: Run = request.param
    return made


@asynccontextmanager
async def serving_tls(folder: Path, port: int, pair: Pair) -> AsyncIterator[Served]:
    keys = folder / "keys"
    keys.write_text(KEY)
    async with serving(
        folder, http_port=port, api_key_file=keys, tls_cert_file=pair.cert, tls_key_file=pair.key
    ) as served:
        yield served


def trusting(cert: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cert))


async def ask(port: int, cert: Path, path: str = "/v1/models") -> int:
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"https://localhost:{port}{path}"
    async with aiohttp.ClientSession(headers=headers) as http, http.get(url, ssl=trusting(cert)) as response:
        return response.status


def test_over_tls_1_2_and_up_and_in_no_other_way_a_key_is_let_in(
    socket_folder: Path, free_port: int, pair: Pair, run: Run
) -> None:
    async def connect() -> None:
        async with serving_tls(socket_folder, free_port, pair):
            assert await ask(free_port, pair.cert) == 200
            for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                context = trusting(pair.cert)
                context.minimum_version = context.maximum_version = version
                reader, writer = await asyncio.open_connection("localhost", free_port, ssl=context)
                # Whatever name the certificate has: it is the client that minds.
                writer.write(b"GET /v1/models HTTP/1.0\r\nHost: box.example\r\nAuthorization: Bearer wrong\r\n\r\n")
                assert b" 401 " in await reader.readline()
                writer.close()
            old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            old.set_ciphers("DEFAULT@SECLEVEL=0")
            old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
            with pytest.warns(DeprecationWarning, match="TLSv1_1"):
                old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection("localhost", free_port, ssl=old)
            reader, writer = await asyncio.open_connection("localhost", free_port)
            writer.write(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert b"HTTP" not in await reader.read()
            writer.close()

    run(connect())


def test_a_renewed_certificate_is_shown_from_the_reload_on_and_ends_no_stream(
    socket_folder: Path, free_port: int, pair: Pair, run: Run, tmp_path: Path
) -> None:
    before = tmp_path / "before.pem"
    before.write_bytes(pair.cert.read_bytes())

    async def renew() -> None:
        async with serving_tls(socket_folder, free_port, pair) as served:
            served.host.reply = lambda request: None
            reader, writer = await asyncio.open_connection("localhost", free_port, ssl=trusting(before))
            body = b'{"prompt": [5], "stream": true}'
            head = f"POST /v1/completions HTTP/1.0\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await until(lambda: bool(served.host.submitted))
            assert served.http_api.reload_certificate() is False
            renewed = make_pair(tmp_path / "renewed")
            pair.cert.write_bytes(renewed.cert.read_bytes())
            with pytest.raises(PageddError, match="it is not the key of"):
                served.http_api.reload_certificate()
            assert await ask(free_port, before) == 200
            pair.key.write_bytes(renewed.key.read_bytes())
            assert served.http_api.reload_certificate() is True
            assert await ask(free_port, renewed.cert) == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await ask(free_port, before)
            served.host.produce(served.host.submitted[0].request_id, b"x", finish_reason="length")
            assert b"[DONE]" in await reader.read()
            writer.close()

    run(renew())


def test_whoever_begins_a_handshake_and_says_nothing_keeps_nobody_out_and_is_let_go(
    socket_folder: Path, free_port: int, pair: Pair, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_server, "MAX_HANDSHAKES", 4)
    monkeypatch.setattr(http_api, "HEAD_TIMEOUT_S", 0.5)

    async def crowd() -> None:
        async with serving_tls(socket_folder, free_port, pair):
            num_before = len(os.listdir("/proc/self/fd"))
            mute = [await asyncio.open_connection("localhost", free_port) for _ in range(12)]
            assert await ask(free_port, pair.cert, "/health") == 200
            for reader, writer in mute:
                with_reset = await asyncio.gather(reader.read(), return_exceptions=True)
                assert with_reset[0] == b"" or isinstance(with_reset[0], ConnectionError)
                writer.close()
            assert await ask(free_port, pair.cert, "/health") == 200
            await until(lambda: len(os.listdir("/proc/self/fd")) <= num_before)

    run(crowd())


# The files


def refusal(pair: Pair) -> tuple[str | None, str]:
    with pytest.raises(PageddError) as refused:
        TlsCertificate(*pair).check_dates()
    assert refused.value.code == "invalid_setting"
    return refused.value.field, refused.value.message


def test_files_that_are_not_there_or_no_files_are_named(pair: Pair, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for wrong, why in (("nowhere", "No such file"), ("pipe", "no regular file")):
        field, message = refusal(Pair(tmp_path / wrong, pair.key))
        assert (field, why in message) == ("tls_cert_file", True)
        field, message = refusal(Pair(pair.cert, tmp_path / wrong))
        assert (field, why in message) == ("tls_key_file", True)


@pytest.mark.parametrize(
    ("mode", "is_closed"), [(0o600, True), (0o640, True), (0o400, True), (0o644, False), (0o660, False)]
)
def test_a_key_that_others_have_is_refused(pair: Pair, mode: int, is_closed: bool) -> None:
    pair.key.chmod(mode)
    if is_closed:
        TlsCertificate(*pair).check_dates()
    else:
        assert refusal(pair) == (
            "tls_key_file",
            f"tls_key_file = {pair.key}: mode {mode:04o}, others have the key; chmod 0600 or 0640",
        )


def test_files_that_do_not_belong_together_are_refused(pair: Pair, tmp_path: Path) -> None:
    other = make_pair(tmp_path / "other")
    other.key.chmod(0o600)
    field, message = refusal(Pair(pair.cert, other.key))
    assert (field, "it is not the key of" in message) == ("tls_key_file", True)


@pytest.mark.parametrize("content", ["", "hello", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_files_that_are_no_pem_are_refused(pair: Pair, content: str) -> None:
    key = pair.key.read_text()
    pair.cert.write_text(content)
    assert "not a certificate and its key, in PEM" in refusal(pair)[1]
    pair.key.write_text(content)
    assert "not a certificate and its key, in PEM" in refusal(pair)[1]
    assert key not in refusal(pair)[1]


def test_a_key_that_asks_for_a_password_is_refused_and_nobody_is_asked(pair: Pair, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    openssl("pkey", "-in", pair.key, "-aes256", "-passout", "pass:x", "-out", locked)
    locked.chmod(0o600)
    field, message = refusal(Pair(pair.cert, locked))
    assert (field, "it is encrypted" in message) == ("tls_key_file", True)


async def test_an_expired_certificate_is_refused_by_the_check_and_costs_the_socket_nothing(
    socket_folder: Path, free_port: int, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    openssl("x509", "-in", pair.cert, "-signkey", pair.key, "-days", "-1", "-out", pair.cert)
    assert refusal(pair) == ("tls_cert_file", f"tls_cert_file = {pair.cert}: certificate has expired; renew it")
    async with serving_tls(socket_folder, free_port, pair) as served:
        assert (await served.get("/ready"))[0] == 200
    assert "clients will refuse the certificate" in caplog.text


def test_a_certificate_that_ends_soon_is_said_to(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    TlsCertificate(*pair).check_dates()
    assert "ends in 2.0 days; renew it and reload" in caplog.text


# The settings


def test_the_settings_of_tls_belong_together(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert", tmp_path / "key"
    on_port: dict[str, Any] = {"http_port": 8400, "api_key_file": tmp_path / "keys"}
    for settings, field in (
        ({**on_port, "tls_cert_file": cert}, "tls_cert_file"),
        ({**on_port, "tls_key_file": key}, "tls_key_file"),
        ({"tls_cert_file": cert, "tls_key_file": key}, "tls_cert_file"),
        ({**on_port, "http_host": "192.0.2.1"}, "http_host"),
    ):
        with pytest.raises(PageddError) as refused:
            DaemonConfig(**settings)
        assert (refused.value.code, refused.value.field) == ("invalid_setting", field)
    assert DaemonConfig(**on_port, http_host="192.0.2.1", tls_cert_file=cert, tls_key_file=key).http_host == "192.0.2.1"
