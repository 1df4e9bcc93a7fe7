"""HTTP/1.1 over the Unix socket and, when configured with keys, over loopback TCP: OpenAI's API, health and metrics.

Owns the sockets, who may call, and errors as HTTP. What each of `http_routes.py` does is `http_handlers.py`'s. There is
no CORS header on purpose: a page in a browser has no business here.
"""

import asyncio
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web

from pagedd.client.endpoints import Endpoints
from pagedd.client.error_body import error_body
from pagedd.client.errors import PageddError
from pagedd.daemon.activation import Inherited, listen
from pagedd.daemon.api_keys import ApiKey, configured_keys, find_key, reread_keys
from pagedd.daemon.caller import Caller, caller_of_socket
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.http_body import BodyReader
from pagedd.daemon.http_connection import HEAD_TIMEOUT_S, HttpConnection, OpenConnections, max_connections
from pagedd.daemon.http_handlers import CALLER, Handlers
from pagedd.daemon.http_routes import ROUTES
from pagedd.daemon.runtime_dir import REQUESTS_MODE
from pagedd.daemon.service import Service
from pagedd.daemon.tls_certificate import TlsCertificate, configured_certificate
from pagedd.daemon.tls_server import TlsServer
from pagedd.daemon.turnstile import Turnstile

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Door = Callable[[web.Request], Caller]  # who calls; raises `PageddError` for one who may not

MAX_HEADER_BYTES = 8192
_BACKLOG = 512
# About as many milliseconds: what a refusal costs.
_MAX_STARTS_A_TURN = 8
# Without a request, or with half of its head. As many as web servers usually give.
_IDLE_CONNECTION_S = 75.0
# After `Service.close` every answer is complete; what a client has not read by then is cut.
_SHUTDOWN_S = 2.0


_OPEN_PATHS = frozenset(route.path for route in ROUTES if route.is_open)


class HttpApi:
    """Serves `service` on `endpoints.http`, and on `config.http_port` to those with a key of `config.api_key_file`."""

    def __init__(
        self, service: Service, config: DaemonConfig, endpoints: Endpoints, inherited: Inherited | None = None
    ) -> None:
        self._service = service
        self._path = endpoints.http
        self._inherited = inherited or {}
        self._config = config
        self._keys: list[ApiKey] = []
        self._certificate: TlsCertificate | None = None
        self._tls_server: TlsServer | None = None
        self._runners: list[web.AppRunner] = []
        self._listeners: list[asyncio.Server] = []
        self._turnstile = Turnstile(_MAX_STARTS_A_TURN)
        self._bodies = BodyReader()

    async def start(self) -> None:
        """Binds and serves.

        Raises `OSError` when the Unix socket cannot be had, `PageddError("invalid_setting")` for a TCP port that is
        taken, a key file that holds no key, or a certificate that cannot serve. One that has expired is only said in
        the log: the Unix socket needs none.
        """
        self._certificate = configured_certificate(self._config)
        if self._certificate is not None:
            _say_if_refused(self._certificate)
        self._keys = configured_keys(self._config.api_key_file, self._config.quota.key)
        # Anybody may connect over TCP, with a key or without, so it has its own and the smaller share.
        for_tcp = 0 if self._config.http_port is None else max_connections() // 4
        for_unix = max_connections() - for_tcp
        await self._serve(self._unix_door, listen(self._path, REQUESTS_MODE, self._inherited), for_unix)
        if self._config.http_port is not None:
            listener = _bind_tcp(self._config.http_host, self._config.http_port)
            await self._serve(self._tcp_door, listener, for_tcp, self._certificate)

    def reload_keys(self, names_with_quota: Iterable[str]) -> bool:
        """Takes over the key file as it is now; whether it has changed. `names_with_quota` as the settings are now.

        Raises `PageddError("invalid_setting")` for a file that is wrong, which changes nothing.
        """
        before, self._keys = self._keys, reread_keys(self._config.api_key_file, names_with_quota)
        return self._keys != before

    def reload_certificate(self) -> bool:
        """Takes over certificate and key as they are now; whether they have changed. Open connections keep theirs.

        Raises `PageddError("invalid_setting")` for files that cannot serve, which change nothing.
        """
        if self._certificate is None or not self._certificate.reload():
            return False
        _say_if_refused(self._certificate)
        return True

    async def close(self) -> None:
        """Stops listening, gives the answers under way a moment to leave, and removes the socket."""
        for listener in self._listeners:
            listener.close()
        if self._tls_server is not None:
            await self._tls_server.close()
            self._tls_server = None
        for runner in self._runners:
            await runner.cleanup()
        if self._runners and self._path not in self._inherited:
            self._path.unlink(missing_ok=True)
        self._runners.clear()
        self._listeners.clear()

    async def _serve(
        self, door: Door, listener: socket.socket, max_open: int, certificate: TlsCertificate | None = None
    ) -> None:
        runner = web.AppRunner(
            _application(self._service, door, self._turnstile, self._bodies),
            handler_cancellation=True,
            handle_signals=False,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await runner.setup()
        self._runners.append(runner)
        server = runner.server
        if server is None:
            raise RuntimeError("a runner that is set up has a server")

        connections = OpenConnections(max_open)

        def connect() -> HttpConnection:
            return HttpConnection(
                server,
                connections,
                lambda error: _error(self._service, error),
                access_log=None,
                max_line_size=MAX_HEADER_BYTES,
                max_field_size=MAX_HEADER_BYTES,
                auto_decompress=False,
                keepalive_timeout=_IDLE_CONNECTION_S,
            )

        if certificate is not None:
            self._tls_server = TlsServer(listener, connect, certificate, HEAD_TIMEOUT_S, _BACKLOG)
            return
        loop = asyncio.get_running_loop()
        self._listeners.append(await loop.create_server(connect, sock=listener, backlog=_BACKLOG))

    def _unix_door(self, request: web.Request) -> Caller:
        connection = request.transport.get_extra_info("socket") if request.transport is not None else None
        if connection is None:
            raise PageddError("forbidden", "the connection is gone")
        return caller_of_socket(connection)

    def _tcp_door(self, request: web.Request) -> Caller:
        # A name that a web page made to point here has another Host, whatever address it leads to. Over TLS the
        # certificate is not that name's, and no browser goes on.
        host = request.headers.get("Host", "").lower()
        allowed = {self._config.http_host, "localhost", "127.0.0.1", "[::1]"}
        if self._certificate is None and host.removesuffix(f":{self._config.http_port}") not in allowed:
            raise PageddError("forbidden", f"Host {host[:64]!r}; ask for localhost:{self._config.http_port}")
        if request.path in _OPEN_PATHS:
            return Caller(key_id="none")
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            key = find_key(self._keys, shown.strip())
            if key is not None:
                return Caller(key_id=key.name, has_admin_key=key.is_admin)
        raise PageddError("unauthorized", "the API key is absent or wrong; send Authorization: Bearer KEY")


def _say_if_refused(certificate: TlsCertificate) -> None:
    try:
        certificate.check_dates()
    except PageddError as error:
        log.error("clients will refuse the certificate: %s", error)


def _application(service: Service, door: Door, turnstile: Turnstile, bodies: BodyReader) -> web.Application:
    handlers = Handlers(service, bodies)
    application = web.Application(middlewares=[_gate(service, door, turnstile)])
    for route in ROUTES:
        application.router.add_route(route.method, route.path, getattr(handlers, route.handler))
    return application


def _gate(service: Service, door: Door, turnstile: Turnstile) -> Any:
    """Who calls, and every refusal or fault as OpenAI's error object with its status."""

    @web.middleware
    async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path not in _OPEN_PATHS:
                await turnstile.enter()
            request[CALLER] = door(request)
            _check_encoding(request)
            return await handler(request)
        except PageddError as error:
            return _error(service, error)
        except web.HTTPMethodNotAllowed as refusal:
            methods = sorted(refusal.allowed_methods)
            said = f"{request.method[:32]} {request.path[:256]}: that path takes {' or '.join(methods)}"
            response = _error(service, PageddError("method_not_allowed", said))
            response.headers["Allow"] = ", ".join(methods)
            return response
        except web.HTTPNotFound:
            said = f"{request.method[:32]} {request.path[:256]}: there is no such path; /openapi.json lists them"
            return _error(service, PageddError("unknown_route", said))
        except ConnectionError:
            raise  # the client is gone; there is nobody to answer
        except web.HTTPException:
            raise
        except Exception:
            log.exception("%s %s broke", request.method, request.path)
            return _error(service, PageddError("internal", "the log has the trace"))

    return gate


def _error(service: Service, error: PageddError) -> web.Response:
    return error_response(error, service.retry_after_s)


def error_response(error: PageddError, retry_after_s: int) -> web.Response:
    """OpenAI's error object with its status; `retry_after_s` is for errors that do not say it themselves."""
    headers = {}
    if error.http_status in (429, 503):
        known_s = error.retry_after_s
        headers["Retry-After"] = str(retry_after_s if known_s is None else max(1, math.ceil(known_s)))
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=error.http_status,
        body=error_body(error.code, error.message, error.field),
        content_type="application/json",
        headers=headers,
    )


def _check_encoding(request: web.Request) -> None:
    """Raises `PageddError("malformed_message")` for a compressed body: a small one may be gigabytes."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise PageddError("malformed_message", f"Content-Encoding: {encoding[:32]}; send the body as it is")


def _bind_tcp(host: str, port: int) -> socket.socket:
    """Raises `PageddError("invalid_setting")`."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        why = f"http_port {port} on {host}: {error.strerror}; choose another, or end what listens there"
        raise PageddError("invalid_setting", why, field="http_port") from error
    return listener
