"""Which of a worker's rounds are recorded. It is asked before a record is made: one that nobody keeps is not sent."""

from typing import Literal

Rounds = Literal["all", "sampled", "none"]
BLOCK = 16  # rounds that are kept or left out together, so that a thinned trace still shows how workers interact
WHOLE_BLOCKS = 64  # blocks at the start that are all kept: the first 1024 rounds of every worker


def is_recorded(rounds: Rounds, number: int) -> bool:
    """Whether the round of this number is. Of a sample a worker's kept rounds grow with the logarithm of its rounds.

    Rounds come in blocks of 16. All of the first 64 blocks are kept, of the next 64 every second one, of the next 128
    every fourth one and so on.
    """
    if rounds != "sampled":
        return rounds == "all"
    block = number // BLOCK
    return block % (1 << (block // WHOLE_BLOCKS).bit_length()) == 0
