"""Sets of workers, encoded as numbers of a message's header."""

from collections.abc import Collection, Sequence

from ashl.stage.contract import Ranks, StageConfig

BITS = 52  # ranks that one number holds as a bit mask


def as_numbers(members: Ranks) -> tuple[float, ...]:
    """Encode sorted ranks in as few numbers as possible.

    Either one negative number for each rank, or one bit mask for every `BITS` ranks.
    """
    if not members or len(members) <= members[-1] // BITS:
        return tuple(-1.0 - member for member in members)
    words = [0] * (members[-1] // BITS + 1)
    for member in members:
        words[member // BITS] |= 1 << member % BITS
    return tuple(map(float, words))


def as_members(numbers: Sequence[float]) -> Ranks:
    """Decode ranks from numbers, see `as_numbers`."""
    if not numbers or numbers[0] < 0:
        return tuple(int(-1 - number) for number in numbers)
    members = []
    for place, number in enumerate(numbers):
        word = int(number)
        while word:
            lowest = word & -word
            members.append(place * BITS + lowest.bit_length() - 1)
            word ^= lowest
    return tuple(members)


def failed_as_numbers(stage: StageConfig, failed: Collection[int]) -> tuple[float, ...]:
    """Encode the failed workers for a reply, if the survivors train on their data; else nothing."""
    return as_numbers(tuple(sorted(failed))) if stage.reshards else ()
