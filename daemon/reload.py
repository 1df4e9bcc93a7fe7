"""What SIGHUP (`systemctl reload`) changes while the daemon runs: the settings of `RELOADABLE`, each in its own way.

The settings are read anew from where the first ones came: the same command line, the environment of the start, the file
as it is now. A file that is wrong changes nothing. What differs and needs a restart is named in the log.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

from pagedd.client.errors import PageddError
from pagedd.daemon.config import DaemonConfig

log = logging.getLogger(__name__)

# What makes a setting hold from now on.
Apply = Callable[[DaemonConfig], None]


class Reloader:
    """The settings that hold, and how some of them are replaced.

    Args:
        read: reads all settings anew. Raises `PageddError` when they are wrong.
        reloadable: by the field of `DaemonConfig`, what makes its new value hold. It must not raise.
    """

    def __init__(self, config: DaemonConfig, read: Callable[[], DaemonConfig], reloadable: Mapping[str, Apply]) -> None:
        self.config = config
        self._read = read
        self._reloadable = reloadable

    def reload(self) -> list[str] | None:
        """Takes over what can be; returns the names of the fields that did, None for wrong settings. Raises nothing."""
        try:
            wanted = self._read()
        except PageddError as error:
            log.error("nothing is reloaded, the settings stay as they are: %s", error)
            return None
        except Exception:
            log.exception("nothing is reloaded, the settings stay as they are")
            return None
        names = [item.name for item in fields(DaemonConfig)]
        changed = [name for name in names if getattr(wanted, name) != getattr(self.config, name)]
        taken = [name for name in changed if name in self._reloadable]
        for name in taken:
            self._reloadable[name](wanted)
        self.config = replace(self.config, **{name: getattr(wanted, name) for name in taken})
        waiting = [name for name in changed if name not in self._reloadable]
        log.info("reloaded: %s", ", ".join(taken) or "nothing has changed that can be")
        if waiting:
            log.warning("a restart is needed for: %s", ", ".join(waiting))
        return taken
