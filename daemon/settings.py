"""Settings declared once, as the fields of a frozen dataclass, and read from flags, environment, TOML and defaults.

Owns parsing, ranges, precedence, where each value came from, and the table for the README. Knows no setting by name:
those are in `config.py`.
"""

import argparse
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

from pagedd.client.errors import PageddError

ENVIRONMENT_PREFIX = "PAGEDD_"

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


class DataclassType(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


D = TypeVar("D", bound=DataclassType)
T = TypeVar("T")


def setting(
    default: T,
    help: str,
    *,
    choices: tuple[str | int, ...] = (),
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    none: str = "auto",
    none_means: str = "",
) -> T:
    """Declares a field of a settings dataclass; the field's annotation is the setting's type.

    Args:
        help: one sentence.
        minimum, above, maximum: the range: at least, more than, at most.
        none: how None is written, where the annotation allows it.
        none_means: what None stands for, for people.
    """
    spec = {
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "none": none,
        "none_means": none_means,
    }
    declared: T = field(default=default, metadata=spec)
    return declared


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One declaration, as read back from the dataclass. `kind` is str, int, float, bool or Path."""

    name: str
    kind: type
    optional: bool
    default: Any
    help: str
    choices: tuple[str | int, ...]
    minimum: float | None
    above: float | None
    maximum: float | None
    none: str
    none_means: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, "--no-" + self.flag[2:]) if self.kind is bool else (self.flag,)

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def allowed(self) -> str:
        """The range in words, empty when every value of the type will do."""
        if self.choices:
            return " or ".join([", ".join(map(str, self.choices[:-1])), str(self.choices[-1])])
        bounds = [
            f"at least {self.minimum}" if self.minimum is not None else "",
            f"more than {self.above}" if self.above is not None else "",
            f"at most {self.maximum}" if self.maximum is not None else "",
        ]
        return ", ".join(bound for bound in bounds if bound)

    @property
    def shown_default(self) -> str:
        means = f": {self.none_means}" if self.default is None and self.none_means else ""
        return self.show(self.default) + means

    def show(self, value: Any) -> str:
        """A value as it is written in an environment variable."""
        if value is None:
            return self.none
        return str(value).lower() if self.kind is bool else str(value)

    def parse(self, text: str, origin: str) -> Any:
        """A flag's or variable's text to a value. Raises `PageddError("invalid_setting")`."""
        if self.optional and text.lower() == self.none:
            return None
        if self.kind is bool:
            if text.lower() not in _TRUE | _FALSE:
                raise self._invalid(text, origin, "it is true or false")
            return text.lower() in _TRUE
        try:
            value = self.kind(text)
        except ValueError:
            raise self._invalid(text, origin, f"it is {_KINDS[self.kind]}") from None
        return self.check(value, origin)

    def accept(self, value: Any, origin: str) -> Any:
        """A TOML value to a value, checked. Raises `PageddError("invalid_setting")`."""
        if self.optional and value == self.none:
            return None
        if self.kind is Path and isinstance(value, str):
            return self.check(Path(value), origin)
        if self.kind is float and type(value) is int:
            return self.check(float(value), origin)
        if type(value) is not self.kind:
            shown = f'"{value}"' if isinstance(value, str) else value  # "4" is a text, and has to look like one
            raise self._invalid(shown, origin, f"it is {_KINDS[self.kind]}")
        return self.check(value, origin)

    def check(self, value: Any, origin: str) -> Any:
        """Returns `value` when it is in range, else raises `PageddError("invalid_setting")`."""
        if self.choices and value not in self.choices:
            raise self._invalid(value, origin, f"it is {self.allowed}")
        if isinstance(value, (str, Path)) and not _is_writable(str(value)):
            # Neither the messages between the processes nor a socket's path can hold it.
            raise self._invalid(ascii(str(value)), origin, "it must be UTF-8 without a NUL")
        if isinstance(value, (int, float)):
            outside = (
                (isinstance(value, float) and not math.isfinite(value))
                or (self.minimum is not None and value < self.minimum)
                or (self.above is not None and value <= self.above)
                or (self.maximum is not None and value > self.maximum)
            )
            if outside:
                raise self._invalid(value, origin, f"it must be {self.allowed or 'finite'}")
        return value

    def _invalid(self, value: Any, origin: str, rule: str) -> PageddError:
        return PageddError("invalid_setting", f"{self.name} = {value} ({origin}): {rule}", field=self.name)


def _is_writable(text: str) -> bool:
    """Bytes that are not UTF-8 reach Python as lone surrogates."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """`config` and, for every setting, where its value came from: a flag, a variable, a file's path or `default`."""

    config: T
    origins: dict[str, str]


def settings_of(cls: type[DataclassType]) -> list[Setting]:
    """The declarations of a settings dataclass, in order."""
    hints = typing.get_type_hints(cls)
    found = []
    for item in fields(cls):
        hint = hints[item.name]
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kind = next(option for option in options if option is not types.NoneType)
        default = item.default if item.default is not MISSING else None
        found.append(
            Setting(
                name=item.name,
                kind=kind,
                optional=types.NoneType in options,
                default=default,
                **item.metadata,
            )
        )
    return found


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
    flags, flag_file = _from_flags(settings, argv, program, default_file)
    variables, variable_file = _from_environment(settings, environ, frozenset(other_variables))
    named = flag_file or variable_file
    file = Path(named) if named else default_file
    document = _from_toml(settings, file, required=named is not None)

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for item in settings:
        if item.name in flags:
            values[item.name], origins[item.name] = flags[item.name], item.flag
        elif item.name in variables:
            values[item.name], origins[item.name] = variables[item.name], item.variable
        elif item.name in document:
            values[item.name], origins[item.name] = document[item.name], str(file)
        else:
            values[item.name], origins[item.name] = item.default, "default"
    return Loaded(cls(**values), origins)


def markdown_table(cls: type[DataclassType]) -> str:
    """Every setting as a row: flag, default, range, meaning. Environment and TOML names follow from the flag."""
    rows = ["| flag | default | values | meaning |", "|---|---|---|---|"]
    for item in settings_of(cls):
        default = item.show(item.default) + (
            f" ({item.none_means})" if item.default is None and item.none_means else ""
        )
        flags = " / ".join(f"`{flag}`" for flag in item.flags)
        values = item.allowed or ("true or false" if item.kind is bool else _KINDS[item.kind])
        rows.append(f"| {flags} | {default} | {values} | {item.help} |")
    return "\n".join(rows)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PageddError("invalid_setting", f"{message}; see {self.prog} --help")


def _from_flags(
    settings: list[Setting], argv: list[str], program: str, default_file: Path
) -> tuple[dict[str, Any], str | None]:
    parser = _Parser(prog=program, allow_abbrev=False, argument_default=argparse.SUPPRESS)
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
            metavar = "|".join(map(str, item.choices)) or item.kind.__name__.upper()
            parser.add_argument(item.flag, dest=item.name, metavar=metavar, help=shown)
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


def _from_toml(settings: list[Setting], file: Path, *, required: bool) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise PageddError("invalid_setting", f"config = {file}: there is no such file", field="config") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PageddError("invalid_setting", f"config = {file}: {error}", field="config") from error
    by_name = {item.name: item for item in settings}
    for key in document:
        if key not in by_name:
            raise _unknown("key", key, by_name, where=f" ({file})")
    return {key: by_name[key].accept(value, str(file)) for key, value in document.items()}


def _unknown(what: str, name: str, known: Iterable[str], where: str = "") -> PageddError:
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else "see pagedd --help for all of them"
    return PageddError("unknown_setting", f"{what} {name}{where}: there is none of that name; {hint}", field=name)
