"""Reads settings: flags over environment over TOML over defaults, each value with where it came from.

Owns precedence, and the table for the README. What a value may be is `setting.py`'s. Knows no setting by name: those
are in `config.py`.
"""

import argparse
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from pagedd.client.errors import PageddError
from pagedd.client.nearest import did_you_mean
from pagedd.daemon.files import read_regular, reason
from pagedd.daemon.setting import (
    ENVIRONMENT_PREFIX,
    KINDS,
    DataclassType,
    Setting,
    Table,
    settings_of,
    shown,
    tables_of,
    toml_name,
)

D = TypeVar("D", bound=DataclassType)

_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Loaded(Generic[D]):
    """`config` and, for every setting, where its value came from: a flag, a variable, a file's path or `default`."""

    config: D
    origins: dict[str, str]

    def explain(self, chosen: Mapping[str, object] | None = None) -> Iterator[str]:
        """A line of TOML for every setting: its value and where it came from.

        `chosen` has, by name, what is taken where a setting says `auto`.
        """
        for item in settings_of(type(self.config)):
            holder = getattr(self.config, item.table) if item.table else self.config
            value, origin = getattr(holder, item.key), self.origins[item.name]
            if chosen and value in (None, "auto") and item.name in chosen:
                value, origin = chosen[item.name], f"auto ({origin})"
            yield f"{item.toml_key} = {item.toml(value)}  # {origin}"
        for table in tables_of(type(self.config)).values():
            for kind, cls in table.subtables.items():
                for name, holder in getattr(getattr(self.config, table.name), kind).items():
                    for item in settings_of(cls, table.name):
                        origin = self.origins.get(f"{table.name}.{kind}.{name}.{item.key}", self.origins[item.name])
                        key = f"{table.name}.{kind}.{toml_name(name)}.{item.key}"
                        yield f"{key} = {item.toml(getattr(holder, item.key))}  # {origin}"


def load_settings(
    cls: type[D],
    argv: list[str],
    environ: Mapping[str, str],
    default_file: Path,
    *,
    program: str,
    other_variables: Iterable[str] = (),
) -> Loaded[D]:
    """Flags over environment over TOML over defaults.

    `--config PATH` (or `PAGEDD_CONFIG`) names the TOML file, which must then exist; `default_file` is read if it does.
    `other_variables` are `PAGEDD_…` variables that mean something to another program. An empty variable is as if unset.

    Raises `PageddError`: `unknown_setting` (naming the nearest that exists) or `invalid_setting`. `--help` exits.
    """
    settings = settings_of(cls)
    flags, flag_file = _from_flags(settings, argv, program)
    variables, variable_file = _from_environment(settings, environ, frozenset(other_variables))
    named = flag_file or variable_file
    file = Path(named) if named else default_file
    document = _read_toml(file, required=named is not None)
    written = _from_toml(settings, tables_of(cls), document, str(file))

    values: dict[str, Any] = {}
    origins: dict[str, str] = dict.fromkeys(written.of_one, str(file))
    for item in settings:
        if item.name in flags:
            values[item.name], origins[item.name] = flags[item.name], item.flag
        elif item.name in variables:
            values[item.name], origins[item.name] = variables[item.name], item.variable
        elif item.name in written.of_all:
            values[item.name], origins[item.name] = written.of_all[item.name], str(file)
        else:
            values[item.name], origins[item.name] = item.default, "default"
    return Loaded(_build(cls, values, written), origins)


def markdown_table(cls: type[DataclassType], table: str = "") -> str:
    """Every setting of one TOML table, or outside tables, as a row: flag, default, range, meaning.

    Environment and TOML names follow from the flag.
    """
    rows = ["| flag | default | values | meaning |", "|---|---|---|---|"]
    for item in settings_of(cls):
        if item.table != table:
            continue
        default = item.show(item.default) + (
            f" ({item.none_means})" if item.default is None and item.none_means else ""
        )
        flags = " / ".join(f"`{flag}`" for flag in item.flags)
        values = item.allowed or ("true or false" if item.kind is bool else KINDS[item.kind])
        rows.append(f"| {flags} | {default} | {values} | {item.help} |")
    return "\n".join(rows)


def add_flags(parser: argparse.ArgumentParser, settings: Iterable[Setting]) -> None:
    """`--config` and a flag for each setting, whose value comes as the text that was given."""
    parser.add_argument(
        "--config",
        metavar="PATH",
        help="TOML file; its keys are the flags' names with _ for - [/etc/pagedd/pagedd.toml]",
    )
    for item in settings:
        shown = f"{item.help} [{item.shown_default}]".replace("%", "%%")
        if item.kind is bool:
            parser.add_argument(item.flag, dest=item.name, action=argparse.BooleanOptionalAction, help=shown)
        else:
            metavar = "|".join(map(str, item.choices)) or (
                "NAMES" if item.kind is tuple else item.kind.__name__.upper()
            )
            parser.add_argument(item.flag, dest=item.name, metavar=metavar, help=shown)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PageddError("invalid_setting", f"{message}; see {self.prog} --help")


def _from_flags(settings: list[Setting], argv: list[str], program: str) -> tuple[dict[str, Any], str | None]:
    parser = _Parser(prog=program, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    add_flags(parser, settings)
    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        known = ["--config", *(flag for item in settings for flag in item.flags)]
        raise _unknown("flag", unknown[0].split("=")[0], known)
    given = vars(parsed)
    file = given.pop("config", None)
    by_name = {item.name: item for item in settings}
    return {
        name: value if isinstance(value, bool) else by_name[name].parse(value, by_name[name].flag)
        for name, value in given.items()
    }, file


def _from_environment(
    settings: list[Setting], environ: Mapping[str, str], other: frozenset[str]
) -> tuple[dict[str, Any], str | None]:
    by_variable = {item.variable: item for item in settings}
    file_variable = ENVIRONMENT_PREFIX + "CONFIG"
    found: dict[str, Any] = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in other or variable == file_variable:
            continue
        if variable not in by_variable:
            raise _unknown("environment variable", variable, [*by_variable, file_variable])
        if text:
            item = by_variable[variable]
            found[item.name] = item.parse(text, variable)
    return found, environ.get(file_variable) or None


def _read_toml(file: Path, *, required: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular(file, _MAX_FILE_BYTES)[0].decode("utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise PageddError("invalid_setting", f"config = {file}: there is no such file", field="config") from None
    except (OSError, ValueError, RecursionError) as error:
        # ValueError: no TOML, no UTF-8, or an integer of too many digits.
        raise PageddError("invalid_setting", f"config = {file}: {shown(reason(error))}", field="config") from error


@dataclass(frozen=True, slots=True)
class _Written:
    """What a TOML file says: `of_all` by a setting's name, `of_one` by the dotted key in a sub-table."""

    of_all: dict[str, Any] = field(default_factory=dict)
    of_one: dict[str, Any] = field(default_factory=dict)
    names: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # sub-tables of (table, kind of name)


def _from_toml(settings: list[Setting], tables: Mapping[str, Table], document: dict[str, Any], file: str) -> _Written:
    written = _Written()
    outside = {item.key: item for item in settings if not item.table}
    for key, value in document.items():
        if key not in tables:
            _accept(key, value, outside, file, tables, written.of_all)
            continue
        inside = {item.key: item for item in settings if item.table == key}
        subtables = tables[key].subtables
        for inner, inner_value in _table(key, value, file).items():
            if inner not in subtables:
                _accept(inner, inner_value, inside, file, subtables, written.of_all, within=f"{key}.")
                continue
            declared = {item.key: item for item in settings_of(subtables[inner], key)}
            written.names[key, inner] = list(_table(f"{key}.{inner}", inner_value, file))
            for name, settings_of_one in inner_value.items():
                within = f"{key}.{inner}.{name}."
                named = {item: replace(spec, name=within + item, table="") for item, spec in declared.items()}
                for item, item_value in _table(within.removesuffix("."), settings_of_one, file).items():
                    _accept(item, item_value, named, file, (), written.of_one, within=within)
    return written


def _accept(
    key: str,
    value: Any,
    known: Mapping[str, Setting],
    file: str,
    also_known: Iterable[str],
    values: dict[str, Any],
    within: str = "",
) -> None:
    """Checks one key of a file and puts its value under the setting's name."""
    if key not in known:
        raise _unknown("key", within + key, [within + other for other in (*known, *also_known)], where=f" ({file})")
    values[known[key].name] = known[key].accept(value, file)


def _table(key: str, value: Any, file: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PageddError(
            "invalid_setting", f"{shown(key)} = {shown(value)} ({file}): it is a table, [{shown(key)}]", field=key
        )
    return value


def _build(cls: type[D], values: Mapping[str, Any], written: _Written) -> D:
    arguments = {item.key: values[item.name] for item in settings_of(cls) if not item.table}
    hints = typing.get_type_hints(cls)
    for table in tables_of(cls).values():
        inside = {item.key: values[item.name] for item in settings_of(cls) if item.table == table.name}
        for kind, one in table.subtables.items():
            inside[kind] = {
                name: one(
                    **{
                        item.key: written.of_one.get(f"{table.name}.{kind}.{name}.{item.key}", values[item.name])
                        for item in settings_of(one, table.name)
                    }
                )
                for name in written.names.get((table.name, kind), ())
            }
        arguments[table.name] = hints[table.name](**inside)
    return cls(**arguments)


def _unknown(what: str, name: str, known: Iterable[str], where: str = "") -> PageddError:
    name = shown(name)
    hint = did_you_mean(name, known, "see pagedd --help for all of them")
    return PageddError("unknown_setting", f"{what} {name}{where}: there is none of that name; {hint}", field=name)
