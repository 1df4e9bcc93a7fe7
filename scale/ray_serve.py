"""pagedd as an application of Ray Serve: `serve run pagedd.scale.ray_serve:build replicas=2 flags="--device cpu"`.

Owns what Ray is told: how many replicas with which resources, and that its own prefix-affinity router picks one, so
that prompts which begin alike come to the daemon that has their beginning cached.
"""

import asyncio
import inspect
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import RequestRouterConfig
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pagedd.client.error_body import error_body
from pagedd.client.errors import ERROR_KINDS
from pagedd.client.protocol import MAX_MESSAGE_BYTES
from pagedd.scale.ask import Ask
from pagedd.scale.replica import Replica

# Twice a daemon's seats, so that its batch is full and its queue short: what waits at Ray can still go elsewhere.
MAX_ONGOING_REQUESTS = 64
# So many more requests than the idlest replica outweigh a cached prefix.
IMBALANCED_THRESHOLD = 16
# After a replica that ended, until the request goes to another: Ray has to hear of it first.
_PAUSE_S = 0.3
_NUM_TRIES = 2
_NUMBER_NAMES = {int: "a whole number", float: "a number"}
# Characters of prompts that the router remembers, for all replicas together.
_REMEMBERED_CHARS = 4_000_000


class RayReplica(Replica):
    """A replica as Ray constructs, checks and deletes it."""

    def died(self) -> None:
        # Ray hears of a process that ends at once, sends nothing more here, and starts another; its health checks take
        # half a minute, in which every second request would fail.
        self.close()
        os._exit(os.EX_UNAVAILABLE)

    def __del__(self) -> None:
        # What Ray calls when it stops a replica, after its requests.
        self.close()


class Front:
    """Takes HTTP, has Ray pick a replica, and passes its answer on as it comes."""

    def __init__(self, replicas: Any) -> None:
        self._relay = replicas.options(method_name="relay", stream=True)

    async def __call__(self, request: Request) -> Response:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_MESSAGE_BYTES:
                return _refusal("message_too_large", f"the body has over {MAX_MESSAGE_BYTES} bytes")
        ask = Ask.of(request.method, request.url.path, body)
        if not ask.is_relayed:
            return _refusal("unknown_route", f"{ask.method} {ask.path}: no route of pagedd behind Ray Serve")
        for number in range(_NUM_TRIES):
            if number:
                await asyncio.sleep(_PAUSE_S)
            # The router compares what is given by position, and takes any replica for what is given by name.
            answer = self._relay.remote(ask) if ask.prompt else self._relay.remote(ask=ask)
            try:
                head = await anext(aiter(answer))
            except RayError as error:  # the replica is gone, and nothing of its answer has come
                if isinstance(error, RayTaskError) and not isinstance(error.cause, (OSError, aiohttp.ClientError)):
                    raise  # it is not: this is a fault of its code, which another would repeat
                continue
            return StreamingResponse(answer, status_code=head.status, headers=head.headers)
        return _refusal("engine_died", f"{_NUM_TRIES} replicas ended with this request; send it again")


def _refusal(code: str, message: str) -> Response:
    """As a daemon would say it."""
    status = ERROR_KINDS[code].http_status
    headers = {"Retry-After": "1"} if status == 503 else None
    return Response(error_body(code, message, None), status, headers, media_type="application/json")


def application(
    flags: Sequence[str] = (),
    *,
    replicas: int = 1,
    num_cpus: float = 1,
    num_gpus: float = 0,
    max_ongoing_requests: int = MAX_ONGOING_REQUESTS,
    imbalanced_threshold: int = IMBALANCED_THRESHOLD,
) -> Any:
    """A Ray Serve application. Each replica is a daemon with `flags`, on a machine that has `num_cpus` and `num_gpus`.

    With GPUs Ray shows each replica its own, which the daemon calls cuda:0.
    """
    router = RequestRouterConfig(
        request_router_class=prefix_affinity_router(),
        request_router_kwargs={
            "imbalanced_threshold": imbalanced_threshold,
            "do_eviction": True,
            "eviction_threshold_chars": _REMEMBERED_CHARS,
            "eviction_target_chars": _REMEMBERED_CHARS * 9 // 10,
        },
    )
    daemons = serve.deployment(
        RayReplica,
        name="pagedd",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus},
        max_ongoing_requests=max_ongoing_requests,
        request_router_config=router,
    )
    front = serve.deployment(Front, name="front", max_ongoing_requests=max_ongoing_requests * replicas)
    return front.bind(daemons.bind(list(flags)))


# Arguments of `build` beside `flags`, and what each is.
_NUMBERS = {
    name: parameter.annotation
    for name, parameter in inspect.signature(application).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def build(arguments: Mapping[str, str]) -> Any:
    """`application` for `serve run` and its YAML: `flags` as a shell would read them, all else numbers."""
    numbers: dict[str, Any] = {}
    for name, text in arguments.items():
        if name == "flags":
            continue
        if name not in _NUMBERS:
            raise ValueError(f"{name}: not an argument of pagedd.scale.ray_serve:build; see docs/scale-out.md")
        try:
            numbers[name] = _NUMBERS[name](text)
        except ValueError:
            raise ValueError(f"{name} = {text}: it is {_NUMBER_NAMES[_NUMBERS[name]]}") from None
    return application(shlex.split(arguments.get("flags", "")), **numbers)


def prefix_affinity_router() -> Any:
    """Ray's `PrefixCacheAffinityRouter`.

    Its public module also has routers that need vLLM, and cannot be imported without; this one's own module can.
    """
    try:
        from ray.serve.llm.request_router import PrefixCacheAffinityRouter
    except ImportError:
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
    return PrefixCacheAffinityRouter
