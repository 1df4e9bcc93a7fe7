"""A machine that runs systemd: this one's own, booted in namespaces over a copy-on-write view of its disk."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOOT = Path(__file__).with_name("boot.sh")
SYSTEMD = Path("/lib/systemd/systemd")
BOOT_TIMEOUT_S = 30.0
# As in `boot.sh`.
EMPTY = ("/run", "/tmp", "/var/tmp", "/dev")

_ENTER = ("--mount", "--pid", "--uts", "--ipc", "--cgroup", "--root", "--wd")


class Machine:
    """A booted systemd. What is written inside is gone afterwards."""

    def __init__(self, folder: Path, shown: list[Path]) -> None:
        self._folder = folder
        self._cgroup = f"pagedd-test-{os.getpid()}"
        self._log = (folder / "boot.log").open("w+")
        state = folder / "state"
        state.mkdir()
        command = ["unshare", "--mount", str(BOOT), str(state), self._cgroup, *map(str, _hidden(shown))]
        # In a session of its own, so that a Ctrl-C ends the tests and the tests end this.
        self._unshare = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self._pid_1: int | None = None

    def boot(self) -> None:
        """Waits until the basic target is reached. Raises `RuntimeError` with what was said when it is not."""
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while time.monotonic() < deadline and self._unshare.poll() is None:
            children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
            if children and Path(f"/proc/{children[0]}/comm").read_text() == "systemd\n":
                self._pid_1 = int(children[0])
                if self.run("systemctl", "is-active", "basic.target", check=False).stdout == "active\n":
                    return
            time.sleep(0.1)
        raise RuntimeError(self.said() or f"basic.target was not reached within {BOOT_TIMEOUT_S:g} s")

    def run(self, *command: str, check: bool = True, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs a command inside, as root. A failure that is not expected shows the command's words."""
        finished = subprocess.run(
            [
                *("nsenter", f"--target={self._pid_1}", *_ENTER),
                *("env", "-i", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", *command),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and finished.returncode != 0:
            pytest.fail(f"{' '.join(command)}: status {finished.returncode}\n{finished.stdout}{finished.stderr}")
        return finished

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).stdout.strip()

    def write(self, path: str, text: str) -> None:
        self.run("mkdir", "-p", str(Path(path).parent))
        self.run("sh", "-c", 'printf %s "$1" >"$2"', "sh", text, path)

    def open_to_everyone(self, path: Path) -> None:
        """Lets every user inside reach `path`: a test may run from below /root, where a service's user may not look."""
        self.run("chmod", "a+x", *(str(parent) for parent in path.parents))
        self.run("chmod", "a+rX", str(path))

    def said(self) -> str:
        self._log.seek(0)
        return self._log.read().strip()

    def close(self) -> None:
        # The kernel ends everything in the namespace with its first process; --kill-child sees to that one.
        self._unshare.kill()
        self._unshare.wait()
        self._log.close()
        remove = 'mount -t cgroup2 cgroup2 "$1" && find "$1/$2" -depth -type d -exec rmdir {} + ; umount "$1"'
        place = self._folder / "cgroup"
        place.mkdir()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            removed = subprocess.run(
                ["unshare", "--mount", "sh", "-c", remove, "sh", str(place), self._cgroup],
                capture_output=True,
                text=True,
            )
            if not removed.stderr or "No such file" in removed.stderr:
                return
            time.sleep(0.1)  # the last processes are still on their way out
        pytest.fail(f"control group {self._cgroup} could not be removed: {removed.stderr}")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, model_gguf: Path) -> Iterator[Machine]:
    if os.geteuid() != 0:
        pytest.skip("booting systemd needs root")
    for program in ("unshare", "nsenter", "systemctl", "make"):
        if shutil.which(program) is None:
            pytest.skip(f"booting systemd needs {program}")
    if not SYSTEMD.exists():
        pytest.skip(f"{SYSTEMD} is not installed")
    shown = [ROOT, Path(sys.prefix), Path(sys.base_prefix), model_gguf.parent]
    booted = Machine(tmp_path_factory.mktemp("systemd"), shown)
    try:
        try:
            booted.boot()
        except RuntimeError as error:
            pytest.skip(f"systemd does not boot in namespaces here: {error}")
        yield booted
    finally:
        booted.close()


def _hidden(folders: list[Path]) -> list[Path]:
    """Those that an overlay of / does not show: on another mount, or in a folder that `boot.sh` shows empty."""
    hidden = []
    for folder in folders:
        mount = folder
        while not mount.is_mount():
            mount = mount.parent
        if mount != Path("/") or any(map(folder.is_relative_to, EMPTY)):
            hidden.append(folder)
    # One inside another is shown with it.
    return [folder for folder in hidden if not any(other in folder.parents for other in hidden)]
