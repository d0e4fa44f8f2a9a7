"""Schedules of the Hopper attention kernel: they fix its speed and cannot change a bit.

The order of additions (KV blocks of one size at absolute positions, ascending; one float32
accumulator an output element) belongs to the topology. What stands here says who computes a query
row, and when.
"""

import dataclasses

WARPGROUP_ROWS = 64  # query rows of one consumer warpgroup: the m of the wgmma instruction
HEADS = 8  # query heads of a turned item: the least n of the wgmma instruction
MOST_HALF = 4  # query heads a KV head that have a warp each, its first eight rows for tokens
LONG = 16_384  # query tokens a request from which the L2 cache is too small for all KV heads
MULTIPROCESSORS = 132  # of an H200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How query rows are laid out over warpgroups and CTAs.

    Attributes:
      consumers: warpgroups that compute, 64 query rows each; 1 suits decode, 2 suits prefill.
      stages: KV blocks in flight in shared memory, for keys and for values each.
      overlap: what the softmax of a block runs beside. "turns": the other warpgroup's products, the
        two taking turns at the tensor cores; "scores": the warpgroup's own next scores; "blocks":
        for one consumer, two warpgroups make the scores and the softmax of every other block, and a
        third multiplies with the values, block after block.
      ctas: CTAs of the persistent grid; one fits a multiprocessor (an H200 has 132).
      half_rows: tiles of at most 8 tokens, so that queries fill only the first eight of the sixteen
        rows of each warp, and the softmax is done for these alone; for one consumer and groups
        of up to 4.
      columns: CTAs that share a tile and KV head, each with its part of the value columns; all of
        them compute the scores.
      most_columns: takes the place of `columns` in a launch whose work list is so short that even
        these parts all find a CTA; None: never.
      order: of the work list. "tiles": a tile's KV heads one after the other; "heads": a KV head's
        tiles, so that fewer keys and values are in use at a time and stay in the L2 cache.
      quiet: rows that hold no query are zeros in both products, where they would be numbers that
        nobody reads; for half_rows and overlap "scores".
      turned: an item is one token; keys are the rows of the scores' product and value columns those
        of the outputs', beside 8 columns of query heads; for one consumer, overlap "scores" or
        "blocks", and groups that divide 8.
    """

    consumers: int = 2
    stages: int = 2
    overlap: str = "turns"
    ctas: int = MULTIPROCESSORS
    half_rows: bool = False
    columns: int = 1
    most_columns: int | None = None
    order: str = "tiles"
    quiet: bool = False
    turned: bool = False

    def __post_init__(self):
        if self.consumers not in (1, 2):
            raise ValueError(f"consumers={self.consumers} must be 1 or 2")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")
        if self.overlap not in ("turns", "scores", "blocks"):
            raise ValueError(f"overlap={self.overlap!r} must be 'turns', 'scores' or 'blocks'")
        if self.overlap == "blocks" and self.consumers != 1:
            raise ValueError(f"overlap='blocks' needs consumers=1, got {self.consumers}")
        if self.most_columns not in (None, 2, 4):
            raise ValueError(f"most_columns={self.most_columns} must be None, 2 or 4")
        if self.order not in ("tiles", "heads"):
            raise ValueError(f"order={self.order!r} must be 'tiles' or 'heads'")
        if self.ctas < 1:
            raise ValueError(f"ctas={self.ctas} must be at least 1")
        if self.half_rows and self.consumers != 1:
            raise ValueError(f"half_rows needs consumers=1, got {self.consumers}")
        if self.quiet and not (self.half_rows and self.overlap == "scores"):
            raise ValueError(f"quiet needs half_rows and overlap='scores', got {self}")
        if self.turned and (self.consumers > 1 or self.overlap == "turns" or self.half_rows):
            raise ValueError(f"turned needs consumers=1, whole rows and no turns, got {self}")
        if self.columns not in (1, 2, 4):
            raise ValueError(f"columns={self.columns} must be 1, 2 or 4")

    @property
    def widths(self) -> list["Schedule"]:
        """This schedule, and it with `most_columns` in the place of `columns`."""
        if self.most_columns is None:
            return [self]
        narrow = dataclasses.replace(self, columns=self.most_columns, most_columns=None)
        return [dataclasses.replace(self, most_columns=None), narrow]

    @property
    def computing(self) -> int:
        """Warpgroups that compute; one more loads."""
        return 3 if self.overlap == "blocks" else self.consumers

    @property
    def sides(self) -> int:
        """Warpgroups that do a softmax of their own for an item."""
        return 2 if self.overlap == "blocks" else 1

    @property
    def key_phases(self) -> int:
        """Barriers that tell of keys that have come.

        One waits for all phases of a barrier, one by one. Where two warpgroups take every other
        block, each has barriers of its own, also with an odd number of stages.
        """
        return 2 * self.stages if self.overlap == "blocks" else self.stages


def warpgroup_tokens(group: int) -> int:
    """Tokens whose query heads of one KV head fill one 64-row warpgroup.

    A head's rows start on a multiple of 8, the tile of the shared-memory layout, so this is 64, 32,
    16 and 8 tokens for groups of 1, 2, 4 and 8; groups in between leave some rows empty.
    """
    if not 1 <= group <= 8:
        raise NotImplementedError(f"group={group} query heads a KV head: expected 1 to 8")
    return 8 * (WARPGROUP_ROWS // (8 * group))


def schedule_for(
    *,
    tokens: int,
    requests: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    split: bool = False,
    ctas: int = MULTIPROCESSORS,
) -> Schedule:
    """Picks the schedule of a batch of `tokens` query tokens in `requests` requests.

    `split`: keys are split (topology), which gives work to every CTA.

    Invariance: every schedule gives the same bits, so this may look at the row count.
    """
    # Decode: a tile holds a token or two, a second warpgroup would idle. Eight tokens fit a tile.
    if tokens <= max(2 * requests, 8):
        items = ctas if split else tokens * kv_heads
        # A turned item is one token: several of a request would each read all of its keys.
        turned = tokens <= requests and HEADS % group == 0
        if head_dim == 64:  # other cases have not run on a card
            turned &= 2 * items > ctas and not split
        if turned:
            found = _turned_schedule(items, head_dim=head_dim, ctas=ctas)
        else:
            found = _half_schedule(items, group=group, head_dim=head_dim, ctas=ctas)
    else:
        found = Schedule(
            consumers=2,
            stages=2 if head_dim == 128 else 4,
            overlap="turns",
            order="heads" if tokens >= LONG * requests else "tiles",
            ctas=ctas,
        )
    # Results of ranges are float32, and take the room of a third stage.
    return dataclasses.replace(found, stages=2) if split else found


def _turned_schedule(items: int, *, head_dim: int, ctas: int) -> Schedule:
    """For `items` pairs of a token and a KV head; `turned`."""
    # With CTAs to spare, chains of blocks count: three warpgroups and two CTAs share one, the CTAs
    # its value columns, 64 at least each.
    columns = 2 if 2 * items <= ctas else 1
    # With every CTA at work, two blocks in flight keep the memory busy, and more disturb it.
    stages = 4 if columns == 2 else 2 if items >= ctas else 3
    rounds = -(-items * columns // ctas)
    return Schedule(
        consumers=1,
        stages=stages if head_dim == 128 else 2 * stages,
        overlap="blocks" if columns > 1 else "scores",
        ctas=-(-items * columns // rounds),
        columns=columns,
        turned=True,
    )


def _half_schedule(items: int, *, group: int, head_dim: int, ctas: int) -> Schedule:
    """For `items` pairs of a token and a KV head; half the rows of a warpgroup if they do."""
    half = group <= MOST_HALF
    # A chain of blocks is shorter if several CTAs share its value columns; 32 at least each.
    parts = [n for n in (4, 2) if half and head_dim // n >= 32]
    fits = [n for n in parts if items * n <= ctas] or [1]
    # With every CTA at work, two blocks in flight keep the memory busy, and more disturb it.
    stages = 2 if half and items >= ctas else 3
    # As many CTAs as end together: reads go faster than with some that idle in the last round.
    rounds = -(-items * fits[0] // ctas)
    return Schedule(
        consumers=1,
        stages=stages if head_dim == 128 else 2 * stages,
        overlap="blocks" if fits[0] > 1 else "scores",
        ctas=-(-items * fits[0] // rounds),
        half_rows=half,
        quiet=half and fits[0] == 1,
        columns=fits[0],
        # A bucket of 8 rows often holds one.
        most_columns=parts[0] if fits[0] > 1 and fits[0] < parts[0] else None,
    )
