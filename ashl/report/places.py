"""Find an option's place in a comparison: the rank of the best setting that has it."""

from collections.abc import Collection

from ashl.report.leaderboard import Leaderboard


def places(board: Leaderboard, groups: Collection[str]) -> dict[tuple[str, str], str]:
    """Return the place of each (group, option), for example `2 of 12`; over environments best to
    worst.

    An option that all settings of an environment share has no place there. A setting that never
    reached the target has none.
    """
    found: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for part in board.environments:
        options = [
            {(group, row.runs[0].config.get(group)) for group in groups} for row in part.ranked
        ]
        shared = set.intersection(*options)
        reached: dict[tuple[str, str], float] = {}
        for place, (row, chosen) in enumerate(zip(part.ranked, options, strict=True), 1):
            there = place if row.reached else float("inf")
            for group, option in chosen - shared:
                if option is not None:
                    reached.setdefault((group, str(option)), there)
        for option, place in reached.items():
            found.setdefault(option, []).append((place, len(part.ranked)))
    return {option: _said(among) for option, among in found.items()}


def _said(among: list[tuple[float, int]]) -> str:
    """Return places as text: `1 of 12`, `1 to 3 of 12`, `not reached, of 12`."""
    ranks = sorted(place for place, _ in among)
    best, worst = (
        f"{place:g}" if place < float("inf") else "not reached" for place in (ranks[0], ranks[-1])
    )
    sizes = sorted({size for _, size in among})
    of = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return (
        f"{best}{'' if best == worst else f' to {worst}'}{',' if worst == 'not reached' else ''} of"
        f" {of}"
    )
