"""The Textual application: which screen is on, what every screen's keys do, and how the picture is kept up to date."""

import asyncio
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

from rich.console import RenderableType
from textual import on
from textual.app import App, SystemCommand
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.driver import Driver
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.timer import Timer

from pagedd.client.errors import PageddError
from pagedd.tui.driver import TerminalDriver
from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import printable
from pagedd.tui.renderables.notice import Notice
from pagedd.tui.screens.acting import ActingView
from pagedd.tui.screens.overview import Overview
from pagedd.tui.screens.view import Action, View
from pagedd.tui.session import Session
from pagedd.tui.themes import Palette, make_palettes
from pagedd.tui.widgets.painted import Painting

_TICK_S = 1.0
_NOTICE_S = 6.0
# An action that takes longer is said to be under way.
_PATIENCE_S = 0.5


def _blocks() -> View:
    from pagedd.tui.screens.blocks import Blocks

    return Blocks()


def _requests() -> View:
    from pagedd.tui.screens.requests import Requests

    return Requests()


def _prefixes() -> View:
    from pagedd.tui.screens.prefixes import Prefixes

    return Prefixes()


def _events() -> View:
    from pagedd.tui.screens.events import Events

    return Events()


# Made when they are first looked at: most of what they import is not needed for the first picture.
SCREENS_BY_KEY: dict[str, str | Callable[[], Screen[Any]]] = {
    "overview": Overview,
    "blocks": _blocks,
    "requests": _requests,
    "prefixes": _prefixes,
    "events": _events,
}


class Pagetop(App[None]):
    """Shows a session.

    Args:
        theme: a name of `themes.make_palettes`.
    """

    TITLE = "pagetop"
    # Each keeps its own cursor, and what was opened on top of it.
    MODES = SCREENS_BY_KEY
    DEFAULT_MODE = "overview"
    COMMAND_PALETTE_BINDING = "colon"
    CSS = "Screen { scrollbar-size: 0 0; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"show('{name}')", name.capitalize(), show=False)
            for number, name in enumerate(SCREENS_BY_KEY, 1)
        ),
        Binding("question_mark,f1", "help", "Help", show=False),
        Binding("p", "pause", "Pause", show=False),
        Binding("r", "record", "Record", show=False),
        Binding("t", "next_theme", "Theme", show=False),
        Binding("q", "quit", "Quit", show=False),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, priority=True),
    ]

    def __init__(self, session: Session, *, theme: str, glyphs: Glyphs) -> None:
        self.palettes = make_palettes()
        # Under NO_COLOR Textual takes colours out; this has it do so before it makes greys of them.
        super().__init__(driver_class=TerminalDriver, ansi_color=True)
        self.session = session
        self.glyphs = glyphs
        for palette in self.palettes.values():
            self.register_theme(palette.theme)
        for name in set(self.available_themes) - set(self.palettes):
            self.unregister_theme(name)
        self.painting: Painting | None = None
        self.notice: Notice | None = None
        self._notice_timer: Timer | None = None
        self._age_timer: asyncio.TimerHandle | None = None
        self._is_grey = False
        self._set_theme(theme)

    @property
    def palette(self) -> Palette:
        palette = self.palettes[self.theme]
        return palette.greyed if self._is_grey else palette

    def on_mount(self) -> None:
        self.run_worker(self.session.watch(self._changed), name="frames", exit_on_error=True)
        self._tick()
        # What is here stays: the collector need not look at it again with every frame.
        gc.collect()
        gc.freeze()

    async def on_unmount(self) -> None:
        if self._age_timer is not None:
            self._age_timer.cancel()
        await self.session.close()

    @on(Driver.SignalResume)
    def draw_anew(self) -> None:
        """The terminal was a shell's meanwhile."""
        self.refresh(layout=True)
        self.call_after_refresh(self._changed)

    def watch_theme(self, theme: str) -> None:
        self._repaint()

    def act(self, action: Action) -> None:
        """Asks the daemon for something, and says what came of it."""

        async def acting() -> None:
            patience = self.set_timer(_PATIENCE_S, lambda: self.notify("the daemon is asked, and has not answered yet"))
            try:
                done = await action()
            except PageddError as error:
                self._notify_error(error)
            else:
                self.notify(done)
            finally:
                patience.stop()

        self.run_worker(acting(), name="action", exclusive=False)

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """Above the keys for some seconds. Textual's own way would cover rows."""
        text = printable(f"{title}: {message}" if title else message)
        self._say(Notice(text, "accent" if severity == "information" else "bad"))
        if self._notice_timer is not None:
            self._notice_timer.stop()
        self._notice_timer = self.set_timer(timeout or _NOTICE_S, lambda: self._say(None))

    def action_show(self, name: str, filtering: bool = False) -> None:
        """Goes to a screen by its name."""
        while len(self.screen_stack) > 1:
            self.pop_screen()
        self.switch_mode(name)
        if filtering:
            self.call_after_refresh(lambda: self.screen.run_action("filter"))

    def pop_screen(self) -> AwaitComplete:
        """Textual's palette closes once for each key that does so, also when it is gone already."""
        return super().pop_screen() if len(self.screen_stack) > 1 else AwaitComplete()

    def action_open_request(self) -> None:
        """Opens the request under the cursor."""
        from pagedd.tui.screens.request import Request

        screen = self.screen
        sequence = screen.chosen() if isinstance(screen, ActingView) and not isinstance(screen, Request) else None
        if sequence is not None:
            self.push_screen(Request(sequence, self.session.state))

    def action_help(self) -> None:
        from pagedd.tui.screens.help import Help

        if not isinstance(self.screen, Help):
            self.push_screen(Help())

    def action_pause(self) -> None:
        self.session.toggle_pause()
        self._changed()

    def action_record(self) -> None:
        try:
            path = self.session.stop_recording()
            if path is not None:
                self.notify(f"recorded in {path}")
            else:
                self.notify(f"recording to {self.session.start_recording()}; r ends it")
        except PageddError as error:
            self._notify_error(error)
        self._changed()

    def action_next_theme(self) -> None:
        names = list(self.palettes)
        self._set_theme(names[(names.index(self.theme) + 1) % len(names)])

    def _handle_exception(self, error: Exception) -> None:
        # While it leaves, keys that are still on their way find no widgets any more.
        if not self._exit:
            super()._handle_exception(error)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for name in SCREENS_BY_KEY:
            yield SystemCommand(
                name.capitalize(), f"Go to the screen: {name}", lambda name=name: self.action_show(name)
            )
        if isinstance(screen, ActingView):
            yield SystemCommand("Open request", "Block table and text", self.action_open_request)
            yield SystemCommand("Cancel request", "End it (asks first)", screen.action_cancel_request)
            yield SystemCommand(
                "Change priority", "Of the request (asks first)", lambda: screen.action_change_priority(0)
            )
        yield SystemCommand("Pause", "Hold the picture, or let it go on", self.action_pause)
        yield SystemCommand("Record", "Record to a file here, or end the recording", self.action_record)
        for theme in self.palettes:
            yield SystemCommand(f"Theme {theme}", "Change the colours", lambda theme=theme: self._set_theme(theme))
        yield SystemCommand("Help", "Keys, glyphs, and what each number means", self.action_help)
        yield SystemCommand("Quit", "Leave pagetop", self.exit)

    def _set_theme(self, theme: str) -> None:
        self.theme = theme
        # As the theme has it anyway, but Textual would look it up for every widget that it draws.
        self.ansi_color = self.palettes[theme].theme.ansi

    def _changed(self) -> None:
        """There is something new to show."""
        if (fault := self.session.take_fault()) is not None:
            self._notify_error(fault)
        self._follow_age()
        with self._paint():
            for screen in self.screen_stack:
                if isinstance(screen, View):
                    screen.show()
        self._await_age()

    def _follow_age(self) -> None:
        """What is too old to be alive is grey."""
        if self.session.is_stale != self._is_grey:
            self._is_grey = self.session.is_stale
            self._repaint()

    def _notify_error(self, error: PageddError) -> None:
        self.notify(error.message, title=error.code, severity="error")

    def _say(self, notice: Notice | None) -> None:
        self.notice = notice
        self._tick()

    def _tick(self) -> None:
        self._follow_age()
        with self._paint():
            for screen in self.screen_stack:
                if isinstance(screen, View):
                    screen.show_age()
        self._await_age()

    def _await_age(self) -> None:
        """Looks again when there will be an age to show. While pictures come as they should there is none."""
        if self._age_timer is not None:
            self._age_timer.cancel()
        wait_s = max(_TICK_S, self.session.fresh_for_s)
        self._age_timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    @contextmanager
    def _paint(self) -> Iterator[None]:
        """Paints what changes within, unless something lies on top of it, which only Textual can take into account."""
        screen = self.screen
        if not isinstance(screen, View) or not screen.is_whole:
            yield
            return
        painting = self.painting = Painting()
        try:
            yield
        finally:
            self.painting = None
        if painting.compose(screen):
            self._display(screen, cast(RenderableType, painting))

    def _repaint(self) -> None:
        for screen in self.screen_stack if self.is_running else ():
            if isinstance(screen, View):
                screen.repaint()
