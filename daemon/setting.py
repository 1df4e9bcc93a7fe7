"""Settings declared once, as the fields of frozen dataclasses: type, default, range and meaning of each.

A field is one setting, or a table of them (`[quota]`), which may have sub-tables by name (`[quota.user.ana]`). Owns
what a value may be and how one is refused; `settings.py` reads them from flags, environment and TOML.
"""

import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from pagedd.client.errors import PageddError

ENVIRONMENT_PREFIX = "PAGEDD_"

_TRUE = frozenset({"true", "1", "yes", "on"})
_SHOWN_CHARS = 200
# No setting is as large; numbers of thousands of digits can neither be computed with nor written down.
_LARGEST_INT = 10**30
_FALSE = frozenset({"false", "0", "no", "off"})

# Keys of a field's metadata.
_TABLE = "table"
_SUBTABLES = "subtables"


class DataclassType(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


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


def table(default: T) -> T:
    """Declares a field that is a table of settings, a settings dataclass of its own; in TOML `[FIELD]`."""
    declared: T = field(default=default, metadata={_TABLE: True})
    return declared


def subtables(cls: type[T], help: str) -> Mapping[str, T]:
    """Declares, in a table, a field with sub-tables by name, which only TOML can write: `[quota.user.ana]`.

    `cls` is the settings dataclass of one; what a sub-table leaves out is as in the table that it is in.
    """
    declared: Mapping[str, T] = field(default_factory=dict, metadata={_SUBTABLES: cls, "help": help})
    return declared


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One declaration, as read back from the dataclass.

    Attributes:
        name: its own, after that of its table: `quota_max_requests`.
        table: empty outside tables.
        kind: str, int, float, bool, Path, or tuple for a list of texts.
    """

    name: str
    table: str
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
    def key(self) -> str:
        """The name in its own table, and of its field."""
        return self.name.removeprefix(f"{self.table}_")

    @property
    def toml_key(self) -> str:
        return f"{self.table}.{self.key}" if self.table else self.name

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
    def allowed_in_toml(self) -> str:
        """The same as a settings file has to write it."""
        return f"one of {', '.join(map(json.dumps, self.choices))}" if self.choices else self.allowed

    @property
    def shown_default(self) -> str:
        means = f": {self.none_means}" if self.default is None and self.none_means else ""
        return self.show(self.default) + means

    def show(self, value: Any) -> str:
        """A value as it is written in an environment variable."""
        if value is None:
            return self.none
        if self.kind is tuple:
            return ",".join(value) or self.none
        return str(value).lower() if self.kind is bool else str(value)

    def toml(self, value: Any) -> str:
        """A value as it is written in a settings file: JSON's texts, numbers and lists are TOML's."""
        if value is None:
            return json.dumps(self.none)
        if isinstance(value, (bool, int, float, tuple)):
            return json.dumps(value)
        return json.dumps(str(value))

    def parse(self, text: str, origin: str) -> Any:
        """A flag's or variable's text to a value. Raises `PageddError("invalid_setting")`."""
        if self.optional and text.lower() == self.none:
            return None
        if self.kind is bool:
            if text.lower() not in _TRUE | _FALSE:
                raise self._invalid(text, origin, "it is true or false")
            return text.lower() in _TRUE
        if self.kind is tuple:
            items = () if text.lower() == self.none else text.split(",")
            return self.check(tuple(item.strip() for item in items if item.strip()), origin)
        try:
            value = self.kind(text)
        except ValueError:
            raise self._invalid(text, origin, f"it is {KINDS[self.kind]}") from None
        return self.check(value, origin)

    def accept(self, value: Any, origin: str) -> Any:
        """A TOML value to a value, checked. Raises `PageddError("invalid_setting")`."""
        if self.optional and value == self.none:
            return None
        if self.kind is Path and isinstance(value, str):
            return self.check(Path(value), origin)
        if self.kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
            return self.check(tuple(value), origin)
        if self.kind is float and type(value) is int:
            return self.check(float(value) if abs(value) < _LARGEST_INT else math.inf, origin)
        if type(value) is not self.kind:
            shown = f'"{value}"' if isinstance(value, str) else value  # "4" is a text, and has to look like one
            raise self._invalid(shown, origin, f"it is {KINDS[self.kind]}")
        return self.check(value, origin)

    def check(self, value: Any, origin: str) -> Any:
        """Returns `value` when it is in range, else raises `PageddError("invalid_setting")`."""
        if self.choices and value not in self.choices:
            raise self._invalid(value, origin, f"it is {self.allowed}")
        texts = value if isinstance(value, tuple) else (value,) if isinstance(value, (str, Path)) else ()
        if not all(_is_writable(str(text)) for text in texts):
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
        return PageddError("invalid_setting", f"{self.name} = {shown(value)} ({origin}): {rule}", field=self.name)


def _is_writable(text: str) -> bool:
    """Bytes that are not UTF-8 reach Python as lone surrogates."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
    tuple: "texts with commas between them, in TOML a list",
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of settings, as read back. `subtables` are the declarations of one sub-table, by the kind of name."""

    name: str
    subtables: Mapping[str, type[DataclassType]]
    helps: Mapping[str, str]


def settings_of(cls: type[DataclassType], table: str = "") -> list[Setting]:
    """The declarations of a settings dataclass and of its tables, in order. `table` is the table that `cls` is."""
    hints = typing.get_type_hints(cls)
    found = []
    for item in fields(cls):
        hint = hints[item.name]
        if _TABLE in item.metadata:
            found += settings_of(hint, item.name)
        elif _SUBTABLES not in item.metadata:
            options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            found.append(
                Setting(
                    name=f"{table}_{item.name}" if table else item.name,
                    table=table,
                    kind=next(
                        typing.get_origin(option) or option for option in options if option is not types.NoneType
                    ),
                    optional=types.NoneType in options,
                    default=item.default if item.default is not MISSING else None,
                    **item.metadata,
                )
            )
    return found


def tables_of(cls: type[DataclassType]) -> dict[str, Table]:
    """The tables of a settings dataclass, by name."""
    hints = typing.get_type_hints(cls)
    tables = {}
    for item in fields(cls):
        if _TABLE in item.metadata:
            inner = [field for field in fields(hints[item.name]) if _SUBTABLES in field.metadata]
            tables[item.name] = Table(
                name=item.name,
                subtables={field.name: field.metadata[_SUBTABLES] for field in inner},
                helps={field.name: field.metadata["help"] for field in inner},
            )
    return tables


def toml_name(name: str) -> str:
    """A name in a dotted key, in quotes where TOML needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def shown(value: object) -> str:
    """A value of a file in an error message: its beginning, when it is long."""
    try:
        text = str(value)
    except (ValueError, RecursionError):  # an integer of too many digits, tables in tables without end
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
