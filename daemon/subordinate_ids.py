"""Whose a subordinate user id is. `/etc/subuid` lends users ids by the ten thousand, for their containers: who has so
many Unix identities is one caller all the same.

Owns the file's form (subuid(5)). Ids that another directory lends (LDAP) are not known here.
"""

import pwd
from bisect import bisect_right
from pathlib import Path

_FILE = Path("/etc/subuid")


class SubordinateIds:
    """The file as it was when this was made. Without one, everybody is its own owner."""

    def __init__(self, file: Path = _FILE) -> None:
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        # (first, end, owner): [first, end) are the owner's
        self._ranges = sorted(found for line in lines if (found := _range(line)) is not None)
        self._firsts = [first for first, _, _ in self._ranges]

    def owner(self, uid: int) -> int:
        """The user whose id `uid` is; itself when nobody has it lent."""
        at = bisect_right(self._firsts, uid) - 1
        if at >= 0:
            _, end, owner = self._ranges[at]
            return owner if uid < end else uid
        return uid


def _range(line: str) -> tuple[int, int, int] | None:
    """None for what is no line of that form, and for a user who is gone, as the tools that read it have it."""
    name, _, numbers = line.partition(":")
    first, _, count = numbers.partition(":")
    if not (first.isdecimal() and count.strip().isdecimal() and len(numbers) < 32):
        return None
    if name.isdecimal():
        return int(first), int(first) + int(count), int(name)
    try:
        return int(first), int(first) + int(count), pwd.getpwnam(name).pw_uid
    except KeyError:
        return None
