"""Workers, as the numbers of a message's header."""

from collections.abc import Collection, Sequence

from ashl.stage.stage import Members, Stage

BITS = 52  # of a number that hold members


def as_numbers(members: Members) -> tuple[float, ...]:
    """Sorted workers in as few numbers of a header as will do: one for each, below zero, or one for
    `BITS` ranks.
    """
    if not members or len(members) <= members[-1] // BITS:
        return tuple(-1.0 - member for member in members)
    words = [0] * (members[-1] // BITS + 1)
    for member in members:
        words[member // BITS] |= 1 << member % BITS
    return tuple(map(float, words))


def as_members(numbers: Sequence[float]) -> Members:
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


def failed_as_numbers(stage: Stage, gone: Collection[int]) -> tuple[float, ...]:
    """What the answer to a worker says of those who are gone, where it goes on with a part of their
    data.
    """
    return as_numbers(tuple(sorted(gone))) if stage.reshards else ()
