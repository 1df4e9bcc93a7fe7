"""The questions that the ZeroMQ sockets answer about the daemon, and what they are answered with.

Each is a message of `protocol.py`. Who may see whose text is decided by the daemon (`daemon/inspection.py`); the
picture that comes by itself is `stats_frame.py`'s.
"""

import msgspec

from pagedd.client.stats_frame import StatsFrame
from pagedd.client.usage import CallerUsage, Cost


class GetStats(msgspec.Struct, tag="get_stats", kw_only=True):
    """Ask for one `StatsFrame`; `blocks` adds the block map and every block table. Only here rows have a `preview`."""

    id: str
    blocks: bool = False


class GetBlock(msgspec.Struct, tag="get_block", kw_only=True):
    """Ask what block `index` (physical) holds and who uses it: a `BlockDetail`, or `invalid_value` beyond the pool."""

    id: str
    index: int


class GetPrefixes(msgspec.Struct, tag="get_prefixes", kw_only=True):
    """Ask for the tree of cached prefixes, at most `limit` nodes of it (1 … 10000), most recently used first."""

    id: str
    limit: int = 1000


class EvictPrefix(msgspec.Struct, tag="evict_prefix", kw_only=True):
    """Admin socket only: forget a prefix of `Prefixes` and all that continues it, but for blocks in use: `Evicted`."""

    id: str
    digest: str


class GetText(msgspec.Struct, tag="get_text", kw_only=True):
    """Ask for the text of a live request by its daemon-given `request_id`: a `RequestText`, or `forbidden`."""

    id: str
    target: str


class GetPreviews(msgspec.Struct, tag="get_previews", kw_only=True):
    """Ask for the first words of the live requests whose text the asker may see: `Previews`. It costs no step."""

    id: str


class GetUsage(msgspec.Struct, tag="get_usage", kw_only=True):
    """Ask who has used how much, and what a token costs: a `UsageReport`."""

    id: str


class Stats(msgspec.Struct, tag="stats", kw_only=True):
    """Answer to `GetStats`."""

    id: str
    frame: StatsFrame


class Owner(msgspec.Struct, kw_only=True):
    """A live sequence that names a block: choice `index` of `request_id`, in whose table it is entry `logical`."""

    request_id: str
    index: int
    logical: int


class BlockDetail(msgspec.Struct, tag="block", kw_only=True):
    """Answer to `GetBlock`: one block at one moment. `text` is None for those who may not see it.

    Who may: root, the daemon's own user, and the user whose request wrote the block or uses it.

    Attributes:
        state: free, cached or used.
        owners: the live sequences that name it; `ref_count` of them unless one has just ended.
        num_tokens: slots that are filled.
        digest: hex; empty when the block is not in the prefix index. For those who may not see its text it is another
            number, equal for equal content, from which the content cannot be guessed.
        num_hits: requests that found it in the prefix cache.
        last_use_s: seconds since a sequence let go of it; 0 while it is used, None while it is free.
        text: `token_ids` decoded, control tokens spelled out.
    """

    id: str
    index: int
    state: str
    ref_count: int = 0
    owners: list[Owner] = []
    num_tokens: int = 0
    digest: str = ""
    num_hits: int = 0
    last_use_s: float | None = None
    token_ids: list[int] = []
    text: str | None = None


class PrefixNode(msgspec.Struct, kw_only=True):
    """A run of indexed blocks without a branch. `text` is None for those who may not see it (see `BlockDetail`).

    Attributes:
        digest: of the run's first block, hex; names the node. As in `BlockDetail`, a stand-in for some.
        parent: digest of the node that this one continues; empty for the beginning of a prompt.
        depth: tokens before this node.
        num_hits: requests that found its first block.
        age_s: seconds since its first block was last used; 0 while it is used.
        state: used (all of it), cached (nothing of it is used), mixed (the beginning is used).
        user: the only user who may share it; empty when all may.
        text: the first words.
    """

    digest: str
    parent: str
    depth: int
    num_tokens: int
    num_blocks: int
    num_hits: int = 0
    age_s: float = 0.0
    state: str = "cached"
    user: str = ""
    text: str | None = None


class Prefixes(msgspec.Struct, tag="prefixes", kw_only=True):
    """Answer to `GetPrefixes`. A parent stands before its children.

    `num_blocks` counts every indexed block, also of nodes that the limit left out (`is_cut`).
    """

    id: str
    nodes: list[PrefixNode] = []
    num_blocks: int = 0
    is_cut: bool = False


class Evicted(msgspec.Struct, tag="evicted", kw_only=True):
    """Answer to `EvictPrefix`: so many blocks are free now; `num_kept` of the prefix are in use and stay.

    Attributes:
        num_left_on_disk: blocks in files that could not be removed, or not within half a second: not served any more,
            but back after a restart if they stay.
        num_beside_on_disk: blocks of other prefixes that the disk has lost, since they lay in the same files.
    """

    id: str
    num_blocks: int
    num_kept: int = 0
    num_left_on_disk: int = 0
    num_beside_on_disk: int = 0


class RequestText(msgspec.Struct, tag="text", kw_only=True):
    """Answer to `GetText`. A prompt of over 16384 characters keeps its beginning, an output its end.

    Attributes:
        prompt: as it was given; a chat as lines of `role: content`.
        outputs: what each choice has produced so far, by its index.
    """

    id: str
    request_id: str
    prompt: str = ""
    outputs: list[str] = []


class Previews(msgspec.Struct, tag="previews", kw_only=True):
    """Answer to `GetPreviews`: by daemon-given `request_id`, the prompt's first characters in one line."""

    id: str
    previews: dict[str, str] = {}


class UsageReport(msgspec.Struct, tag="usage", kw_only=True):
    """Answer to `GetUsage`. A row for each caller, the one that used it last at the end; costs are of all together.

    Attributes:
        energy_source: what the joules are of: `gpu`, `cpu` (its packages), `gpu+cpu`, or `stated` (the configured
            wattage). Empty when nothing can be measured and nothing is stated.
        has_box_price, has_kwh_price: whether amounts of money hold the box's share, and its power's.
        idle_joules: what the box has used while nothing was computed, which is in nobody's joules.
    """

    id: str
    callers: list[CallerUsage]
    last_minute: Cost
    since_start: Cost
    energy_source: str = ""
    has_box_price: bool = False
    has_kwh_price: bool = False
    idle_joules: float | None = None


Question = GetStats | GetBlock | GetPrefixes | EvictPrefix | GetText | GetPreviews | GetUsage
Answer = Stats | BlockDetail | Prefixes | Evicted | RequestText | Previews | UsageReport
