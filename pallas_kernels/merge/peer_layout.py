"""Where things lie in the workspace by which the cards of one host hand each other their terms.

Each card has one workspace of the same layout; every kernel over peers uses it, one after another.
A CTA of a kernel has its own control words, slots and count of exchanges, and deals with the CTAs
of the same index on the other cards alone. Bytes:

    control   [CTAS, 128]                          a word a rank, set by that rank; the count at 64
    words     [CTAS, 2, ranks, ROUNDS, 128, 16]    two numbers a thread, each with its own flag
    terms     [CTAS, 2, ranks, ROUNDS, 128, 16]    four numbers a thread
    shares    [2, CTAS, ranks, rounds, 128, 16]    four numbers a thread of a rank's share
    sums      [2, CTAS, ranks, rounds, 128, 16]    and their sums

The two halves are used by turns: who sends exchange i has seen every peer's part of exchange i - 1,
so every peer is done with i - 2. How many rounds a share has may differ from kernel to kernel,
which moves the CTAs' slots: when a kernel ends, all peers are done with all shares of it, and who
sends a sum has seen that all peers are in the same kernel.
"""

from dataclasses import dataclass

THREADS = 128
SLOT = 16 * THREADS  # bytes that a CTA sends at once
CONTROL = 128
COUNT_AT = 64
MOST_RANKS = 16

WORDS_CTAS, WORDS_ROUNDS = 132, 16
TERMS_CTAS, TERMS_ROUNDS = 132, 8
SHARE_CTAS = 528
CHUNK_SLOTS = 8  # that a CTA sends before it waits: of all ranks' shares together, at most
# Most CTAs by ranks: what has run on cards with its bits compared; other numbers of ranks have 96.
SHARE_CTAS_OF = {2: SHARE_CTAS, 4: 264}
LEAST_CTAS = 132  # smaller messages have smaller chunks, down to one slot a rank

WORDS, TERMS, SHARES = "words", "terms", "shares"
WORDS_BYTES = 128 * 1024  # the largest float32 term that goes as words
TERMS_BYTES = 256 * 1024  # and that every rank adds whole


@dataclass(frozen=True, kw_only=True)
class PeerLayout:
    """Byte offsets in the workspace of each of `ranks` cards."""

    ranks: int

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"ranks={self.ranks} must be 2 to {MOST_RANKS}")

    @property
    def words(self) -> int:
        return SHARE_CTAS * CONTROL

    @property
    def terms(self) -> int:
        return self.words + WORDS_CTAS * 2 * self.ranks * WORDS_ROUNDS * SLOT

    @property
    def shares(self) -> int:
        return self.terms + TERMS_CTAS * 2 * self.ranks * TERMS_ROUNDS * SLOT

    @property
    def sums(self) -> int:
        return self.shares + self._chunks

    @property
    def size(self) -> int:
        return self.sums + self._chunks

    @property
    def _chunks(self) -> int:
        """Bytes of the chunks of all CTAs, two halves."""
        return 2 * SHARE_CTAS * max(CHUNK_SLOTS, self.ranks) * SLOT


@dataclass(frozen=True, kw_only=True)
class PeerSchedule:
    """How a message is exchanged; changes no bit.

    Attributes:
      form: "words", every number with a flag beside it, no fence; "terms", all numbers, then one
        flag; "shares", a rank adds its share and hands the sums out.
      ctas: of the kernel.
      rounds: how often each takes its next numbers; of shares, in a chunk, of which a CTA takes one
        after the other.
    """

    form: str
    ctas: int
    rounds: int


def pick_peer_schedule(*, elements: int, ranks: int, form: str | None = None) -> PeerSchedule:
    """The schedule of a message.

    Args:
      elements: of a float32 term, a multiple of 4.
      ranks: cards.
      form: None: by size.
    """
    if form is None:
        size = 4 * elements
        form = WORDS if size <= WORDS_BYTES else TERMS if size <= TERMS_BYTES else SHARES
    if form == SHARES:
        rounds = max(1, CHUNK_SLOTS // ranks)
        while rounds > 1 and chunks_of(elements, ranks=ranks, rounds=rounds) < LEAST_CTAS:
            rounds //= 2
        most = SHARE_CTAS_OF.get(ranks, 96)
        ctas = min(most, chunks_of(elements, ranks=ranks, rounds=rounds))
        return PeerSchedule(form=form, ctas=ctas, rounds=rounds)
    numbers, most, ctas = (
        (2, WORDS_ROUNDS, WORDS_CTAS) if form == WORDS else (4, TERMS_ROUNDS, TERMS_CTAS)
    )
    tiles = -(-elements // (numbers * THREADS))
    ctas = min(ctas, tiles)
    rounds = -(-tiles // ctas)
    if rounds > most:
        raise ValueError(f"{elements} elements are too many for the form {form!r}")
    return PeerSchedule(form=form, ctas=ctas, rounds=rounds)


def chunks_of(elements: int, *, ranks: int, rounds: int) -> int:
    """Chunks of a message that goes by shares; each holds `rounds` slots of every rank."""
    return -(-elements // (ranks * rounds * SLOT // 4))
