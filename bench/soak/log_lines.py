"""Which lines of the daemon's log a soak explains; every other one is a finding."""

import re

# A line of `logs.HumanFormatter`; what does not begin so belongs to the line before it.
_LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (?P<level>[A-Z]+) +(?P<words>.*)")
_EXPLAINED = tuple(
    re.compile(pattern)
    for pattern in (
        # `Faults.engine_killed` and `engine_hangs`; the trace that is asked of a hung engine follows in further lines.
        r"engine_lives: the engine process \(pid \d+\) was ended by SIGKILL.*(; starting another in |before it slept)",
        r"engine_child: the engine process \(pid \d+\) .*; it is ended$",
        r"engine_lives: .*(?:step|hung|said nothing).*; starting another in ",
        r"crash_reports: a crash report is in ",
        # `Faults.disk_full`.
        r"crash_reports: no crash report could be kept in .*No space left on device",
        r"disk_tier: KV blocks cannot be written to .*(No space left on device|no room for)",
        # `engine_pauses`.
        r"engine_lives: the engine process is ",
    )
)


def unexplained(log: str) -> list[str]:
    """Lines of at least a warning that no injected fault explains, each with the first of what follows it."""
    found: list[str] = []
    is_open = False
    for line in log.splitlines():
        match = _LINE.match(line)
        if match is None:
            if is_open:
                found[-1] += f"\n{line}"
            continue
        is_open = match["level"] not in ("DEBUG", "INFO") and not any(
            pattern.match(match["words"]) for pattern in _EXPLAINED
        )
        if is_open:
            found.append(line)
    return found
