"""The reference in `docs/` says what the code does. `python -P tests/test_docs.py` writes the tables anew."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedd.client import protocol
from pagedd.client.errors import ERROR_KINDS
from pagedd.daemon.cli import EXIT_STATUSES
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.http_routes import ROUTES
from pagedd.daemon.limits import LIMITS
from pagedd.daemon.openai_schema import UNSUPPORTED_FIELDS
from pagedd.daemon.settings import markdown_table

ROOT = Path(__file__).parent.parent
SOURCES = [path for folder in ("engine", "daemon", "client") for path in sorted((ROOT / folder).rglob("*.py"))]
ERRORS_FILE = ROOT / "client" / "errors.py"
# Whatever takes a code as its first argument.
CODE_TAKERS = {"PageddError", "EngineError", "Broken", "LoadFailed"}


def table(*rows: tuple[str, ...]) -> str:
    head, *body = rows
    lines = [head, ("---",) * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def errors_table() -> str:
    rows = [(f"`{code}`", str(kind.http_status), kind.meaning) for code, kind in ERROR_KINDS.items()]
    return table(("Code", "HTTP", "Meaning"), *rows)


def limits_table() -> str:
    rows = [(f"`{limit.field}`", limit.range, limit.meaning) for limit in LIMITS.values()]
    return table(("Field", "Range", "Meaning"), *rows)


def routes_table() -> str:
    return table(("Route", "What"), *((f"`{route.method} {route.path}`", route.meaning) for route in ROUTES))


def messages_table() -> str:
    rows = []
    for side, union in (("client", protocol.ClientMessage), ("daemon", protocol.DaemonMessage)):
        for message in union.__args__:
            fields = ", ".join(f"`{name}`" for name in message.__struct_fields__)
            summary = (message.__doc__ or "").strip().split("\n")[0]
            rows.append((f"`{message.__struct_config__.tag}`", side, fields, summary))
    return table(("Type", "From", "Fields", "What"), *rows)


def exits_table() -> str:
    unit = (ROOT / "systemd" / "pagedd.service").read_text()
    final = re.search(r"^RestartPreventExitStatus=(.*)$", unit, re.M)
    assert final is not None
    statuses: dict[int, list[str]] = {}
    for code, status in EXIT_STATUSES.items():
        statuses.setdefault(status, []).append(f"`{code}`")
    rows = [
        (str(status), ", ".join(codes), "no" if str(status) in final[1].split() else "yes")
        for status, codes in sorted(statuses.items())
    ]
    return table(
        ("status", "when", "restarted by the unit"),
        ("0", "told to stop, and drained", "no"),
        *rows,
        (str(os.EX_SOFTWARE), "any other fault", "yes"),
        ("143, 130", "a second SIGTERM or SIGINT: ended at once, without draining", "yes, but for `systemctl stop`"),
    )


PARTS = {
    "exits": ("service.md", exits_table),
    "errors": ("errors.md", errors_table),
    "routes": ("api.md", routes_table),
    "limits": ("api.md", limits_table),
    "unsupported": ("api.md", lambda: ", ".join(f"`{name}`" for name in UNSUPPORTED_FIELDS) + "."),
    "messages": ("api.md", messages_table),
    "flags": ("settings.md", lambda: markdown_table(DaemonConfig)),
    "quota": ("quotas.md", lambda: markdown_table(DaemonConfig, "quota")),
    "cost": ("quotas.md", lambda: markdown_table(DaemonConfig, "cost")),
}


def split(name: str) -> tuple[Path, str, str, str]:
    """The file, and its text before, in and after the part."""
    path = ROOT / "docs" / PARTS[name][0]
    match = re.fullmatch(rf"(.*<!-- {name}: begin -->\n)(.*)(<!-- {name}: end -->.*)", path.read_text(), re.DOTALL)
    assert match is not None, f"{path} has no part {name}"
    return path, *match.groups()


@pytest.mark.parametrize("name", PARTS)
def test_a_table_says_what_the_code_says(name: str) -> None:
    _, _, written, _ = split(name)
    assert written.strip() == PARTS[name][1](), "run python -P tests/test_docs.py"


def codes_given(path: Path) -> Iterator[tuple[int, str]]:
    """Line and code of each literal code that is raised or sent."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = list(node.args[:1]) if name in CODE_TAKERS else []
            given += [keyword.value for keyword in node.keywords if keyword.arg in ("code", "error_code")]
            for argument in given:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_code_that_is_given_is_in_the_table(path: Path) -> None:
    assert [(line, code) for line, code in codes_given(path) if code not in ERROR_KINDS] == []


@pytest.mark.parametrize("code", ERROR_KINDS)
def test_every_code_of_the_table_is_given_somewhere(code: str) -> None:
    assert any(f'"{code}"' in path.read_text() for path in SOURCES if path != ERRORS_FILE)


if __name__ == "__main__":
    for part, (_, write) in PARTS.items():
        path, before, _, after = split(part)
        path.write_text(f"{before}{write()}\n{after}")
