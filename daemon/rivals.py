"""Who else needs the device now: programs that were named, or anybody whose memory leaves too little of the card free.

Owns the judgement and its calm: a device that has just become free may be wanted again at once, and a load takes
seconds. `device_use.py` gives the device up and takes it back; when to look is `server.py`'s.
"""

import grp
import logging
import os
import pwd
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.gpus import GpuMeter, Nvml, cuda_index, reading
from pagedd.engine.info import EngineInfo

log = logging.getLogger(__name__)

# The device is taken back when nobody has wanted it for so long.
CALM_S = 10.0
# In between, the half-loaded weights of the daemon's own engine would count as somebody else's memory.
_JUDGED_STATES = frozenset({EngineState.READY, EngineState.STALLED, EngineState.ASLEEP})
_GIB = 1 << 30
_INIT = Path("/proc/1/comm")
# A file for each user who is logged in (systemd-logind).
_SESSIONS = Path("/run/systemd/users")


def running_programs() -> Iterable[str]:
    """Names of the processes of this machine, as far as this user may see them, that `_counts`."""
    for process in psutil.process_iter(["name", "uids"]):
        uids = process.info["uids"]
        if uids is not None and _counts(uids.real):
            yield str(process.info["name"] or "")


def _counts(uid: int) -> bool:
    """Anybody may give a program any name: only root's count, the daemon's own, its group's and of who is logged in."""
    if uid in (0, os.geteuid()) or (_SESSIONS / str(uid)).exists():
        return True
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(os.getegid())
    except KeyError:
        return False
    return user.pw_gid == group.gr_gid or user.pw_name in group.gr_mem


def sees_others() -> bool:
    """False where the kernel hides other users' processes, as it does for the unit on a CPU (`ProtectProc=`)."""
    return reading(_INIT.read_bytes) is not None


class Rivals:
    """Looks when it is asked, in any one thread.

    Args:
        load_nvml: called at the first look; what it gives is None where there is none, and then only programs count.
        programs, clock: replaceable for tests; the clock in s.
    """

    def __init__(
        self,
        config: DaemonConfig,
        load_nvml: Callable[[], Nvml | None],
        programs: Callable[[], Iterable[str]] = running_programs,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.yield_to and not sees_others():
            log.warning(
                "yield_to sees this user's own programs alone: others' are hidden; a drop-in with ProtectProc=default "
                "shows them (docs/service.md)"
            )
        self._names = {os.path.basename(name).lower() for name in config.yield_to}
        self._floor_bytes = None if config.yield_below_gib is None else config.yield_below_gib * _GIB
        self._load_nvml = load_nvml
        self._nvml: Nvml | None = None
        self._programs = programs
        self._clock = clock
        self._card: GpuMeter | None = None
        self._engine_pid: int | None = None
        self._engine_bytes = 0.0  # the most that the newest engine was seen to hold
        self._claim: str | None = None
        self._calm_from_s = 0.0

    @property
    def are_awaited(self) -> bool:
        """Whether the settings name anything to look for."""
        return bool(self._names) or self._floor_bytes is not None

    def claim(self, info: EngineInfo | None, pid: int | None, state: EngineState) -> str | None:
        """Why the device should be left to others, in words; None when it need not.

        `info` and `pid` are the engine's, None while there is none; `state` is where it is in its life.
        """
        if info is not None and self._floor_bytes is not None:
            self._know(info, pid)
        claim, now_s = self._program() or self._memory(state), self._clock()
        if claim is not None:
            self._claim, self._calm_from_s = claim, now_s + CALM_S
        elif now_s >= self._calm_from_s:
            self._claim = None
        return self._claim

    def _know(self, info: EngineInfo, pid: int | None) -> None:
        index = cuda_index(info.device)
        if index is None:
            self._card = None
        elif self._card is None or self._card.index != index:
            self._nvml = self._nvml or self._load_nvml()
            self._card = GpuMeter(self._nvml, index)
        if pid != self._engine_pid:
            self._engine_pid, self._engine_bytes = pid, 0.0
        # What it has on purpose. The driver, where it tells, counts CUDA's context, its graphs and activations as well.
        kv_bytes = info.num_blocks * info.block_size * info.kv_bytes_per_token + info.kv_open_bytes
        held = self._card.bytes_of(pid) if self._card is not None and pid is not None else None
        self._engine_bytes = max(self._engine_bytes, info.model_bytes + kv_bytes, held or 0.0)

    def _program(self) -> str | None:
        if not self._names:
            return None
        running = {name.lower() for name in reading(lambda: list(self._programs())) or ()}
        found = sorted(self._names & running)
        return f"{', '.join(found)} {'runs' if len(found) == 1 else 'run'}" if found else None

    def _memory(self, state: EngineState) -> str | None:
        """While the engine sleeps, it has to fit in beside the floor again."""
        if self._floor_bytes is None or self._card is None or state not in _JUDGED_STATES:
            return None
        card = self._card.read()
        if card.memory_total_bytes is None or card.memory_used_bytes is None:
            return None
        free = card.memory_total_bytes - card.memory_used_bytes
        wanted = self._floor_bytes + (self._engine_bytes if state is EngineState.ASLEEP else 0.0)
        if wanted > card.memory_total_bytes:
            # Nobody else could ever be the cause, and the engine would never come back.
            log.debug("the engine and yield_below_gib together exceed the card; its memory is not looked at")
            return None
        return f"{free / _GIB:.1f} GiB of the GPU are free, {wanted / _GIB:.1f} are wanted" if free < wanted else None
