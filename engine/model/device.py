"""Which device and dtype a model gets, and what is known of that device.

Owns the choice, and the check that the device computes at all. What is put on it is `load.py`'s.
"""

import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from pagedd.engine.errors import DeviceLostError, EngineError
from pagedd.engine.faults import is_out_of_memory

log = logging.getLogger(__name__)

LEAST_CAPABILITY = (7, 5)  # Turing: the oldest that all kernels compile for; without matrix instructions, so slowly
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}


def usable_device(name: str) -> torch.device:
    """`choose_device`, and `check_device` of it. Raises what both raise."""
    device = choose_device(name)
    check_device(device)
    return device


def check_current_device() -> None:
    """Waits for the GPU that is in use, if one is. Raises `DeviceLostError` when it answers with an error."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLostError(f"cuda:{torch.cuda.current_device()} answers with: {error}") from error


def choose_device(name: str) -> torch.device:
    """The device that a name means, not touched yet.

    `auto` is the first GPU, or the CPU where there is none or torch is built without CUDA. `cuda` is the first GPU. On
    a machine with several the daemon names one by its free memory before.

    Raises:
        EngineError: `invalid_setting` for another name; `device_unavailable` for a GPU that torch does not see, though
            it may later; `unsupported_device` for one that this torch can never use.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        if _has_nvidia_card():
            if torch.version.cuda is not None:  # its driver may start later than this, or it is lost for a while
                raise EngineError(
                    "device_unavailable", "torch cannot use this machine's GPU; look at the driver, or use cpu"
                )
            log.warning("this machine has an NVIDIA GPU, but this torch is built without CUDA: the CPU serves")
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineError("invalid_setting", f"device {name!r}; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise EngineError("invalid_setting", f"device {name!r}; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        if torch.version.cuda is None:
            raise EngineError(
                "unsupported_device",
                f"device {name!r}, but this torch is built without CUDA; "
                "with a driver there, make the environment anew (make clean, make run), or use cpu",
            )
        count = torch.cuda.device_count()
        if not count:  # its driver may start later than this
            raise EngineError("device_unavailable", f"device {name!r}, but torch sees no GPU; look at the driver")
        device = torch.device("cuda", device.index or 0)
        if device.index >= count:  # it may be lost, or late, beside others that are there
            raise EngineError("device_unavailable", f"device {name!r}, but torch sees {count} GPUs; look at the driver")
    return device


def check_device(device: torch.device) -> None:
    """Makes `device` the current one.

    Raises:
        EngineError: `device_unavailable` when it does not compute, `out_of_memory` when others have all of it,
            `unsupported_device` when it is too old.
    """
    if device.type != "cuda":
        return
    try:
        # Triton launches on the current device, and graphs are captured there.
        torch.cuda.set_device(device)
        capability = torch.cuda.get_device_capability(device)
        torch.zeros(1, device=device).item()
    except RuntimeError as error:
        what = str(error).splitlines()[0]
        if is_out_of_memory(error):
            raise EngineError(
                "out_of_memory", f"{device} has no memory left to begin with ({what}); end what uses it"
            ) from error
        raise EngineError("device_unavailable", f"{device} answers with: {what}; look at the driver") from error
    if capability < LEAST_CAPABILITY:
        least, own = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        raise EngineError("unsupported_device", f"{device} has compute capability {own}, {least} is needed; use cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device multiplies it natively; else float16 on a GPU and float32 on a CPU."""
    if name in _DTYPES:
        return _DTYPES[name]
    if name != "auto":
        raise EngineError("invalid_setting", f"dtype {name!r}; use auto, {', '.join(_DTYPES)}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if _BFLOAT16_FLAGS & set(next(_cpuinfo("flags"), "").split()) else torch.float32


def device_name(device: torch.device) -> str:
    """The device as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return next(_cpuinfo("model name"), platform.processor() or platform.machine())


def num_physical_cores() -> int:
    """Cores that this process may run on, hyper-threads not counted: two threads of a core share its vector units."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for number in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{number}/topology")
        try:
            cores.add(((topology / "physical_package_id").read_text(), (topology / "core_id").read_text()))
        except OSError:
            return len(allowed)
    return len(cores)


def _has_nvidia_card(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether one is plugged in, with or without a driver."""
    return any(
        _text(card / "vendor") == "0x10de" and _text(card / "class").startswith("0x03") for card in devices.glob("*")
    )


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _cpuinfo(name: str) -> Iterator[str]:
    """Values of one field of /proc/cpuinfo; none where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        field, _, value = line.partition(":")
        if field.strip() == name:
            yield value.strip()
