"""A service is asked, without sockets; a scripted host ends what was asked."""

from pagedd.client.protocol import Chat, DaemonMessage, Done, Failed, Generate
from pagedd.daemon.caller import Caller
from pagedd.daemon.service import Service

from .scripted_host import ScriptedHost
from .waiting import until

ANA, BOB, ADMIN = Caller(uid=1001), Caller(uid=1002), Caller(uid=0)


def prompt(text: str = "ab", request_id: str = "a", **fields: object) -> Generate:
    return Generate(id=request_id, prompt=text, **fields)  # type: ignore[arg-type]


def start(service: Service, *messages: Generate | Chat, caller: Caller = ANA) -> list[DaemonMessage]:
    """Starts a request; returns the list that its messages go to."""
    heard: list[DaemonMessage] = []
    service.start(messages or [prompt()], caller, heard.append)
    return heard


async def started(
    service: Service, host: ScriptedHost, *messages: Generate | Chat, caller: Caller = ANA
) -> list[DaemonMessage]:
    """As `start`, and waits until the engine has it, or it is refused."""
    before = len(host.submitted)
    heard = start(service, *messages, caller=caller)
    await until(lambda: len(host.submitted) > before or any(isinstance(message, Failed) for message in heard))
    return heard


def finish(host: ScriptedHost, number: int = 0) -> None:
    """Ends the request that the engine got as its `number`th."""
    host.produce(host.submitted[number].request_id, b"x", finish_reason="length")


def has_ended(heard: list[DaemonMessage]) -> bool:
    return bool(heard) and isinstance(heard[-1], Done | Failed)
