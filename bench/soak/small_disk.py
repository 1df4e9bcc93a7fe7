"""A disk of a daemon's own that may be filled: a tmpfs in a mount namespace, which ends with the daemon."""

import os
import subprocess
from pathlib import Path

_MOUNT_AND_RUN = 'mount -t tmpfs -o "size=$1,mode=700" tmpfs "$2" && shift 2 && exec "$@"'
_CHUNK = bytes(1 << 20)


class SmallDisk:
    """`num_bytes` at `folder`, an empty folder, for the process that `command` starts."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder = folder
        # Without root a user's own namespace may mount; the kernel shows the same user's processes to each other.
        namespaces = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
        self._unshare = ["unshare", *namespaces]
        self._shell = ["sh", "-c", _MOUNT_AND_RUN, "sh", str(num_bytes), str(folder)]

    @property
    def is_possible(self) -> bool:
        """Whether the kernel allows such a namespace to this user."""
        return subprocess.run([*self._unshare, *self._shell, "true"], capture_output=True).returncode == 0

    @property
    def command(self) -> list[str]:
        """To be put before the daemon's own, which then runs under the same process id."""
        return [*self._unshare, *self._shell]

    def fill(self, pid: int) -> None:
        """To the last byte, as the process `pid` sees it."""
        with self._filler(pid).open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(_CHUNK)
            except OSError:
                return

    def empty(self, pid: int) -> None:
        """Takes away what `fill` wrote."""
        self._filler(pid).unlink()

    def _filler(self, pid: int) -> Path:
        return Path(f"/proc/{pid}/root") / self.folder.relative_to("/") / "filler"
