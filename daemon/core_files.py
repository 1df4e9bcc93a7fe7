"""Core files, of which there shall be none: they would hold prompts, and gigabytes of weights."""

import resource


def forbid_core_files() -> None:
    """From now on, for this process and those that it starts; a debugger may still attach.

    The limit is 1 byte where it may be: the kernel hands a core to a program of `core_pattern` whatever the limit, even
    with 0, but not with 1 (core(5); `do_coredump` in fs/coredump.c).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    limit = 0 if hard == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
