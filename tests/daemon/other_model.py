"""Another model that a service can load in place of its own, as a scripted or fake engine runs it."""

import asyncio
from pathlib import Path

from pagedd.daemon.model_loading import Candidate
from pagedd.daemon.served_model import ServedModel
from pagedd.daemon.service import Service
from pagedd.engine.config import EngineConfig

from .asking import ADMIN
from .byte_model import write_model


class OtherModel:
    """`other`, whatever name is asked for, which writes every prompt as [77]; `gate` holds up the look at it."""

    def __init__(self, folder: Path, service: Service, config: EngineConfig | None = None) -> None:
        self._folder = write_model(folder / "other", name="other")
        self._config = config
        self.num_looks = 0
        self.gate = asyncio.Event()
        self.gate.set()
        service.device.find_model = self._find

    async def _token_ids(self, message: object) -> list[int]:
        return [77]

    async def _find(self, name: str, served_name: str | None) -> Candidate:
        self.num_looks += 1
        await self.gate.wait()
        text_side = ServedModel(self._folder, served_name)
        text_side.prompt_token_ids = self._token_ids  # type: ignore[method-assign]
        return Candidate(text_side, self._config or EngineConfig(model=name))


def load(service: Service, name: str = "other", served_name: str | None = None) -> "asyncio.Task[None]":
    return asyncio.create_task(service.device.load_model(name, served_name, ADMIN))
