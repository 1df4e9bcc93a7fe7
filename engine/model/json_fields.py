"""The values of a model's JSON, checked for type and range as they are read: whoever made the folder may be hostile.

Owns what each refusal says. Knows no model.
"""

import math
import reprlib
from collections.abc import Mapping
from typing import Any, TypeGuard

from pagedd.engine.errors import EngineError

# Above every model's sizes, and below what overflows when a few of them are multiplied.
_MOST = (1 << 31) - 1


def unsupported(what: str, advice: str = "choose another model") -> EngineError:
    return EngineError("unsupported_model", f"{what} is not implemented exactly; {advice}")


def malformed(what: str) -> EngineError:
    return EngineError("model_unavailable", f"{what}; fetch the model again")


class JsonFields:
    """One object of config.json. A key with null counts as absent.

    Every method raises `EngineError("model_unavailable")` for a value that cannot be.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def __contains__(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def count(self, name: str, default: int | None = None, most: int = _MOST) -> int:
        """A whole number from 1 to `most`; has to be there if there is no `default`."""
        value = self._raw.get(name)
        value = default if value is None else value
        if _is_whole(value) and 1 <= value <= most:
            return value
        raise _no(name, value, f"a whole number from 1 to {most}")

    def ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; () where there is none."""
        value = self._raw.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(_is_whole(id) and 0 <= id <= _MOST for id in ids):
            raise _no(name, value, "a token id or a list of them")
        return tuple(ids)

    def number(self, name: str, default: float) -> float:
        """Finite."""
        value = self.optional_number(name)
        return default if value is None else value

    def positive(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise _no(name, value, "a number above 0")
        return value

    def optional_number(self, name: str) -> float | None:
        """Finite, or None."""
        value = self._raw.get(name)
        return None if value is None else _number(name, value)

    def positives(self, name: str) -> tuple[float, ...] | None:
        value = self._raw.get(name)
        if value is None:
            return None
        numbers = [_number(name, number) for number in value] if isinstance(value, list) else [0.0]
        if min(numbers, default=0.0) <= 0:
            raise _no(name, value, "a list of numbers above 0")
        return tuple(numbers)

    def text(self, name: str, default: str | None = None) -> str:
        value = self._raw.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise _no(name, value, "a name")
        return value

    def texts(self, name: str) -> list[str] | None:
        value = self._raw.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
            raise _no(name, value, "a list of names")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._raw.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise _no(name, value, "true or false")
        return value

    def part(self, name: str) -> "JsonFields":
        """An object inside it; an empty one where there is none."""
        value = self._raw.get(name)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise _no(name, value, "an object")
        return JsonFields(value)


def shown(value: object) -> str:
    """`value` in an error, and not all of it if it is long."""
    return reprlib.repr(value)


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, value: Any) -> float:
    # A whole number may be too large for a float.
    if (isinstance(value, float) and math.isfinite(value)) or (_is_whole(value) and abs(value) <= _MOST):
        return float(value)
    raise _no(name, value, "a finite number")


def _no(name: str, value: object, what: str) -> EngineError:
    return malformed(f"config.json: {name} is {shown(value)}, not {what}")
