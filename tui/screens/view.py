"""What all screens have in common: header, keys, a place for the picture, and a word when there is no room for it."""

from collections.abc import Iterable
from typing import ClassVar, Protocol, cast

from textual import events
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import Screen
from textual.widget import Widget

from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import cut, fit
from pagedd.tui.renderables.absent import absent_lines
from pagedd.tui.renderables.footer import Hint
from pagedd.tui.renderables.notice import Notice, age_notice
from pagedd.tui.session import Session
from pagedd.tui.state import State
from pagedd.tui.themes import Palette
from pagedd.tui.widgets.bars import Header, KeyBar
from pagedd.tui.widgets.block_map import BlockMap
from pagedd.tui.widgets.pane import Pane

MIN_WIDTH, MIN_HEIGHT = 40, 12
NAVIGATION = [
    Hint("1", "overview", "1", ""),
    Hint("2", "blocks", "2", ""),
    Hint("3", "requests", "3", ""),
    Hint("4", "prefixes", "4", ""),
    Hint("5", "events", "5", "screens"),
]
HELP = Hint("?", "help", "question_mark")
QUIT = Hint("q", "quit", "q")


class Watching(Protocol):
    """What screens ask of their app."""

    session: Session
    palette: Palette
    glyphs: Glyphs
    notice: Notice | None

    def act(self, action: "Action") -> None: ...
    def action_show(self, name: str, filtering: bool = False) -> None: ...
    def action_open_request(self) -> None: ...


class Action(Protocol):
    """Something to ask the daemon for; what it answers, or why it refuses, is shown."""

    async def __call__(self) -> str: ...


class View(Screen[None]):
    """A screen that shows the session's state. Subclasses give the body and fill it in `draw`.

    Attributes:
        is_whole: all of it is on the terminal, and nothing else.
    """

    HINTS: ClassVar[list[Hint]] = [*NAVIGATION, HELP, QUIT]
    DEFAULT_CSS = """
    View { background: $background; color: $foreground; layout: vertical; }
    View > #body { height: 1fr; }
    View > #small, View > #absent { display: none; height: 1fr; }
    View.absent > #body { display: none; }
    View.absent > #absent { display: block; }
    View.small > *, View.small > #absent { display: none; }
    View.small > #small { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("tab", "app.focus_next", show=False)]

    def __init__(self) -> None:
        super().__init__()
        self.is_whole = False
        # Asked for with every picture, so not looked up by name.
        self._header = Header()
        self._keys = KeyBar(self.HINTS)

    def compose(self) -> Iterable[Widget]:
        yield self._header
        with Vertical(id="body"):
            yield from self.body()
        yield from self.foot()
        yield self._keys
        yield Pane(id="absent")
        yield Pane(id="small")

    def body(self) -> Iterable[Widget]:
        """The widgets between header and keys."""
        raise NotImplementedError

    def foot(self) -> Iterable[Widget]:
        """Widgets docked above the keys."""
        return ()

    def hints(self) -> list[Hint]:
        """What the keys do here now."""
        return self.HINTS

    def needs_frame(self) -> bool:
        """Whether there is nothing to show before the first frame."""
        return True

    def draw(self) -> None:
        """Brings the body up to date with `self.state`."""
        raise NotImplementedError

    def fold(self, width: int, height: int) -> None:
        """The screen has another size: which widgets there is room for."""

    @property
    def watching(self) -> Watching:
        return cast(Watching, self.app)

    @property
    def session(self) -> Session:
        return self.watching.session

    @property
    def state(self) -> State:
        return self.session.state

    @property
    def glyphs(self) -> Glyphs:
        return self.watching.glyphs

    def show(self) -> None:
        """Draws everything that changed."""
        if not self.is_mounted:
            return
        self.show_age()
        is_absent = self.state.frame is None and bool(self.session.source.place) and self.needs_frame()
        if is_absent != self.has_class("absent"):
            self.set_class(is_absent, "absent")
            self.call_after_refresh(self._uncovered)
        if self.has_class("small"):
            return
        if is_absent:
            absent = self.query_one("#absent", Pane)
            width = self.size.width
            lines = absent_lines(self.state.link, self.session.source.place, width, self.glyphs)
            absent.show([cut(line, width) for line in lines])
        else:
            self.draw()

    def show_age(self) -> None:
        """Draws what changes by itself as time goes on."""
        if not (self._header.is_attached and self._keys.is_attached):  # not composed yet, or taken down already
            return
        session = self.session
        now_s = session.clock()
        self._header.show_state(session.state, session.modes, now_s)
        notice = self.watching.notice
        if notice is None and self.state.frame is not None and (session.is_stale or self.state.link.error):
            notice = age_notice(self.state, self.state.age_s(now_s))
        if self._keys.show_hints(self.hints(), notice):
            self.call_after_refresh(self.show)

    def repaint(self) -> None:
        """The palette is another one."""
        for pane in self.query(Pane):
            pane.repaint()
        for block_map in self.query(BlockMap):
            block_map.repaint()

    def on_mount(self) -> None:
        self.set_class(not self.glyphs.is_unicode, "ascii")
        # What was drawn before a widget had its size is not the picture. The next frame may be seconds away.
        self.screen_layout_refresh_signal.subscribe(self, lambda _: self.show())

    def on_screen_resume(self) -> None:
        self.repaint()
        self.call_after_refresh(self._resumed)

    def on_screen_suspend(self) -> None:
        self.is_whole = False

    def on_resize(self, event: events.Resize) -> None:
        width, height = event.size
        is_small = width < MIN_WIDTH or height < MIN_HEIGHT
        self.set_class(is_small, "small")
        if is_small:
            words = f"too small: {width}x{height}, needs {MIN_WIDTH}x{MIN_HEIGHT}"
            self.query_one("#small", Pane).show([[(fit(words, width), "warn")]])
        else:
            self.fold(width, height)
        self.call_after_refresh(self.show)

    def _uncovered(self) -> None:
        """The body has its size now, and can have the keys again, which nothing that is hidden keeps."""
        if not self.has_class("absent") and self.AUTO_FOCUS:
            self.query(self.AUTO_FOCUS).first().focus()
        self.show()

    def _resumed(self) -> None:
        self.is_whole = True
        self.show()
