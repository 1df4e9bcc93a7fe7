"""The machine: the GPU when there is one, else the CPU. Its own figures are those of `daemon/telemetry.py`."""

from pagedd.client.stats_frame import Device, Machine
from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, Span, as_fits, cut, fit, printable
from pagedd.tui.renderables import numbers
from pagedd.tui.renderables.bars import bar
from pagedd.tui.state import State

_GIB = 1 << 30


def machine_title(state: State) -> str:
    machine = _machine(state)
    if machine is None or not machine.devices:
        return "CPU"
    return f"{len(machine.devices)} GPUs" if len(machine.devices) > 1 else "GPU"


def machine_lines(state: State, width: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Four lines, or a line a device when there are several."""
    machine = _machine(state)
    if machine is not None and len(machine.devices) > 1:
        return [_device_line(device, width, glyphs) for device in machine.devices[:height]]
    if machine is not None and machine.devices:
        return [cut(line, width) for line in _device_lines(machine.devices[0], width, glyphs)]
    return [cut(line, width) for line in _cpu_lines(state, machine, width, glyphs)]


def machine_row(state: State, width: int, glyphs: Glyphs) -> Line:
    """The same on one line."""
    machine = _machine(state)
    if machine is not None and machine.devices:
        device = machine.devices[0]
        used, total = device.memory_used_bytes, device.memory_total_bytes
        name, extra = "gpu", [f"{numbers.decimal(device.power_w, 4, 0, glyphs.missing)} W"]
    else:
        used, total = (None, None) if machine is None else (machine.memory_used_bytes, machine.memory_total_bytes)
        name, extra = "cpu", []
    bar_width = max(6, min(24, (width - 44) // 2))
    memory: list[Span] = [("mem ", "dim")]
    if width >= 60:
        memory += bar(_share(used, total), bar_width, glyphs)
    parts: list[Line] = [
        [
            (f"{name:<6}", "dim"),
            *bar(state.busy(), bar_width, glyphs),
            (f" {numbers.whole_percent(state.busy(), glyphs.missing)}", ""),
        ],
        [*memory, (_memory(used, total, glyphs), "")],
        *([(part, "dim")] for part in extra),
        [(_temperature(state, glyphs), "dim")],
    ]
    return as_fits(parts, width, "  ")


def _device_lines(device: Device, width: int, glyphs: Glyphs) -> list[Line]:
    missing = glyphs.missing
    busy = None if device.utilization_percent is None else device.utilization_percent / 100
    used, total = device.memory_used_bytes, device.memory_total_bytes
    memory = _memory(used, total, glyphs)
    others = ", ".join(f"{printable(name)} {numbers.size(held, missing).strip()}" for name, held in device.others)
    return [
        [("util  ", "dim"), *bar(busy, _bar_width(width), glyphs), (f" {numbers.whole_percent(busy, missing)}", "")],
        [("mem   ", "dim"), *bar(_share(used, total), _bar_width(width), glyphs), (f" {memory}", "")],
        [
            ("power ", "dim"),
            (f"{numbers.decimal(device.power_w, 4, 0, missing)} W", ""),
            (glyphs.separator, "faint"),
            (f"{numbers.decimal(device.temperature_c, 3, 0, missing)} {glyphs.degree}C", ""),
            (glyphs.separator, "faint"),
            (f"{numbers.count(device.clock_mhz, 5, missing)} MHz", ""),
        ],
        [("others ", "dim"), (others or "none", "" if others else "dim")],
    ]


def _device_line(device: Device, width: int, glyphs: Glyphs) -> Line:
    busy = None if device.utilization_percent is None else device.utilization_percent / 100
    memory = _memory(device.memory_used_bytes, device.memory_total_bytes, glyphs)
    return cut(
        [
            (f"{device.index:<2}", "dim"),
            *bar(busy, max(4, width - 37), glyphs),
            (f" {numbers.whole_percent(busy, glyphs.missing)}", ""),
            (f" {memory}", ""),
            (f"{numbers.decimal(device.power_w, 5, 0, glyphs.missing)} W", "dim"),
            (f"{numbers.decimal(device.temperature_c, 4, 0, glyphs.missing)} {glyphs.degree}C", "dim"),
        ],
        width,
    )


def _cpu_lines(state: State, machine: Machine | None, width: int, glyphs: Glyphs) -> list[Line]:
    missing = glyphs.missing
    used, total = (None, None) if machine is None else (machine.memory_used_bytes, machine.memory_total_bytes)
    cores = state.figure("engine_cpu_cores")
    resident = state.figure("engine_rss_bytes")
    num_cores = None if machine is None else machine.num_cores
    power: list[Span] = []
    if machine is not None and machine.power_w is not None:
        power = [(glyphs.separator, "faint"), (f"{numbers.decimal(machine.power_w, 4, 0)} W", "")]
    return [
        [
            ("cpu   ", "dim"),
            *bar(state.busy(), _bar_width(width), glyphs),
            (f" {numbers.whole_percent(state.busy(), missing)}", ""),
        ],
        [
            ("mem   ", "dim"),
            *bar(_share(used, total), _bar_width(width), glyphs),
            (f" {_memory(used, total, glyphs)}", ""),
        ],
        [
            ("cores ", "dim"),
            (numbers.count(num_cores, 4, missing), ""),
            (glyphs.separator, "faint"),
            (_temperature(state, glyphs), ""),
            *power,
        ],
        [
            ("engine", "dim"),
            (numbers.decimal(cores, 5, 2, missing), ""),
            (" cores", "dim"),
            (glyphs.separator, "faint"),
            (fit(numbers.size(resident, missing).strip(), 9), ""),
        ],
    ]


def _machine(state: State) -> Machine | None:
    return None if state.frame is None else state.frame.machine


def _temperature(state: State, glyphs: Glyphs) -> str:
    machine = _machine(state)
    celsius = None
    if machine is not None:
        celsius = machine.devices[0].temperature_c if machine.devices else machine.temperature_c
    return f"{numbers.decimal(celsius, 3, 0, glyphs.missing)} {glyphs.degree}C"


def _bar_width(width: int) -> int:
    return max(4, width - 6 - 18)


def _share(used: float | None, total: float | None) -> float | None:
    return None if used is None or not total else used / total


def _memory(used: float | None, total: float | None, glyphs: Glyphs) -> str:
    """`  6.1/8.0 GiB`: twelve cells below 1 000 GiB."""
    whole = glyphs.missing if total is None else f"{total / _GIB:.1f}" if total < 100 * _GIB else f"{total / _GIB:.0f}"
    return f"{numbers.decimal(None if used is None else used / _GIB, 5, 1, glyphs.missing)}/{whole} GiB"
