"""The certificate and key that the TCP listener shows: what the two files must be, and what holds after a reload.

Owns the settings of TLS. Who shakes hands is `tls_server.py`'s.
"""

import hashlib
import logging
import ssl
import stat
from pathlib import Path
from typing import NamedTuple

from pagedd.client.errors import PageddError
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.files import read_regular, reason
from pagedd.daemon.wall_clock import unix_s

log = logging.getLogger(__name__)

_MAX_FILE_BYTES = 1 << 20
_WARN_DAYS = 14
# Hello, answer, finished, tickets: more flights than either version of TLS has.
_FLIGHTS = 4


class _Loaded(NamedTuple):
    context: ssl.SSLContext
    digest: bytes  # of both files


class TlsCertificate:
    """`context` is for handshakes from now on; connections that stand keep theirs."""

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        """Raises `PageddError("invalid_setting")` for files that cannot serve, but for a certificate's dates."""
        self._files = cert_file, key_file
        self._loaded = _load(cert_file, key_file)

    @property
    def context(self) -> ssl.SSLContext:
        return self._loaded.context

    def reload(self) -> bool:
        """Takes over the files as they are now; whether they have changed.

        Raises `PageddError("invalid_setting")` for files that cannot serve, which change nothing.
        """
        before, self._loaded = self._loaded, _load(*self._files)
        return self._loaded.digest != before.digest

    def check_dates(self) -> None:
        """Raises `PageddError("invalid_setting")` for a certificate that clients refuse; the log warns of the end."""
        cert_file, _ = self._files
        try:
            shown = _shake_hands_with_itself(self.context, cert_file)
        except ssl.SSLCertVerificationError as error:
            raise _invalid("tls_cert_file", cert_file, f"{error.verify_message}; renew it") from error
        except ssl.SSLError as error:
            raise _invalid("tls_cert_file", cert_file, f"no handshake comes about with it: {error.reason}") from error
        days = (ssl.cert_time_to_seconds(str(shown["notAfter"])) - unix_s()) / 86_400
        if days < _WARN_DAYS:
            log.warning("the certificate in %s ends in %.1f days; renew it and reload", cert_file, days)


def configured_certificate(config: DaemonConfig) -> TlsCertificate | None:
    """None without TLS. Raises `PageddError("invalid_setting")` as `TlsCertificate` does."""
    if config.tls_cert_file is None or config.tls_key_file is None:
        return None
    return TlsCertificate(config.tls_cert_file, config.tls_key_file)


def _load(cert_file: Path, key_file: Path) -> _Loaded:
    cert, _ = _read("tls_cert_file", cert_file)
    key, mode = _read("tls_key_file", key_file)
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise _invalid("tls_key_file", key_file, f"mode {mode & 0o7777:04o}, others have the key; chmod 0600 or 0640")
    # A context of its own each time: of a pair that does not match, the certificate would be in it.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert_file, key_file, _no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise _invalid(
                "tls_key_file", key_file, f"it is not the key of {cert_file}; give the one it came with"
            ) from None
        why = "the two are not a certificate and its key, in PEM"
        raise _invalid("tls_cert_file", f"{cert_file}, tls_key_file = {key_file}", why) from error
    except OSError as error:  # one has gone since
        raise _invalid("tls_cert_file", cert_file, str(error)) from error
    except _EncryptedKeyError:
        why = "it is encrypted, and nobody is there to type; `openssl pkey -in KEY -out PLAIN` decrypts it"
        raise _invalid("tls_key_file", key_file, why) from None
    return _Loaded(context, hashlib.sha256(cert + b"\0" + key).digest())


class _EncryptedKeyError(Exception):
    pass


def _no_password() -> str:
    raise _EncryptedKeyError


def _read(name: str, path: Path) -> tuple[bytes, int]:
    try:
        content, status = read_regular(path, _MAX_FILE_BYTES)
    except OSError as error:
        raise _invalid(name, path, reason(error)) from error
    return content, status.st_mode


def _shake_hands_with_itself(context: ssl.SSLContext, cert_file: Path) -> dict[str, object]:
    """What a client sees of the certificate, that trusts nothing but it. Raises `ssl.SSLError`."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(cert_file)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = trusting.wrap_bio(to_client, to_server)
    for side in (client, server) * _FLIGHTS:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return dict(client.getpeercert() or {})


def _invalid(name: str, value: object, why: str) -> PageddError:
    return PageddError("invalid_setting", f"{name} = {value}: {why}", field=name)
