"""Who asks: the kernel's word about a peer on a Unix socket, or the API key that a TCP caller showed.

Owns identity and the rights that follow from it alone. What a caller says about itself is never used.
"""

import os
import pwd
import socket
import struct
from dataclasses import dataclass
from functools import lru_cache

_UCRED = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


@dataclass(frozen=True, slots=True)
class Caller:
    """One peer. On a Unix socket `uid`, `gid` and `pid` are set; over TCP `key_id`, the key's name, and its scope."""

    uid: int | None = None
    gid: int | None = None
    pid: int | None = None
    key_id: str | None = None
    has_admin_key: bool = False

    @property
    def tag(self) -> str:
        """Callers with the same tag may share cached prefixes. A key and a user can never have the same one."""
        return f"key:{self.key_id}" if self.uid is None else f"uid:{self.uid}"

    @property
    def name(self) -> str:
        """For people: the user's name, its number when it has no name, or the key's id."""
        return f"key {self.key_id}" if self.uid is None else _user_name(self.uid)

    @property
    def is_admin(self) -> bool:
        """Root, the user that the daemon runs as, and who shows a key with that scope."""
        return self.has_admin_key or (self.uid is not None and self.uid in (0, os.geteuid()))

    def may_see(self, tag: str | None) -> bool:
        """Whether texts of the callers with that `tag` are for this one's eyes. `None` is nobody's in particular."""
        return self.is_admin or tag == self.tag


def caller_of_socket(connection: socket.socket) -> Caller:
    """The peer of a connected Unix socket, by SO_PEERCRED."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Caller(uid=uid, gid=gid, pid=pid)


def name_of_tag(tag: str) -> str:
    """`Caller.name` of the callers with that tag."""
    kind, _, value = tag.partition(":")
    return _user_name(int(value)) if kind == "uid" else f"{kind} {value}"


@lru_cache(maxsize=1024)
def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
