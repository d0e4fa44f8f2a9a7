"""What fixes a drawn token: how likelihoods become integers, and how those are walked."""

from dataclasses import dataclass

MAX_VOCAB = 2**18


@dataclass(frozen=True, kw_only=True)
class SamplingTopology:
    """The exact definition of a draw; a kernel may compute its sums in any order.

    Ids are taken in descending order of the logit, the lowest id first on ties.

    1. Kept tokens are a prefix of that order, written as its last (key, id), the *cut*. With
       d[v] = (logit[v] - max) * inv_temperature (two float32 roundings): the prefix with
       d >= log_min_p, then at most top_k tokens of it, then the shortest prefix of those whose
       weight reaches top_p of theirs (never empty).
    2. The weight of v is floor(exp(d[v]) * 2^40), an integer held as two limbs of 20 bits; 0 for
       a token that is not kept. The sums of one limb over a block fit a uint32.
    3. The threshold is floor(u * total / 2^64), where u is the 64-bit word that threefry makes
       of counter (0, 0) under the row's key.
    4. The token is the first v, in order of id, whose running sum exceeds the threshold. Block
       sums find the block and a second walk inside that block finds the token.

    Attributes:
      block: columns a block; the first level of the walk.
      weight_bits: fractional bits of a weight.
    """

    block: int
    weight_bits: int = 40

    def __post_init__(self) -> None:
        if self.block not in (128, 256, 512, 1024, 2048):
            raise ValueError(f"block={self.block} must be a power of two from 128 to 2048")
        if self.weight_bits != 40:
            raise ValueError(f"weight_bits={self.weight_bits} must be 40")


def topology_for(*, vocab_size: int) -> SamplingTopology:
    """The topology of a vocabulary; it has no row count to look at.

    Raises: NotImplementedError for a vocabulary whose sums might leave 64 bits.
    """
    if vocab_size > MAX_VOCAB:
        raise NotImplementedError(
            f"sampling supports vocabularies up to {MAX_VOCAB} tokens, got {vocab_size}"
        )
    return SamplingTopology(block=2048)
