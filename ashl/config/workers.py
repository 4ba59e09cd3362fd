"""How many workers an emulated cluster has, and its lists for so many."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ashl.errors import UsageError

LISTS = ("compute", "link", "node")
MAX_WORKERS = 100_000


def sized(spec: Mapping[str, Any], set_keys: Sequence[Collection[str]]) -> dict[str, Any]:
    """A cluster's spec with `num_workers` filled in and a list of that length wherever there is a
    list.

    `set_keys` has those that were set, those that count most first: on the command line, by an
    experiment. The first of them that say a number, as `num_workers` or as the length of a list,
    decide, and else the option's own do. Other lists start over where they end, on machines of
    their own, or are cut. Raises UsageError on lengths that differ. What has no lists, or is wrong
    in other ways and refused when the option is made, is returned as it is.
    """
    lists = {
        name: values for name in LISTS if isinstance(values := spec.get(name), list) and values
    }
    number = spec.get("num_workers")
    if "compute" not in lists or not (
        number is None or (type(number) is int and 0 < number <= MAX_WORKERS)
    ):
        return dict(spec)
    known = {} if number is None else {"num_workers": number}
    known |= {name: len(values) for name, values in lists.items()}
    own = dict([next(iter(known.items()))])
    named = next(
        (found for keys in set_keys if (found := {k: known[k] for k in known if k in keys})), own
    )
    first, *others = named
    for other in others:
        if named[other] != named[first]:
            has = "is {}" if first == "num_workers" else "has {} entries"
            raise UsageError(
                f"cluster.{other} has {named[other]} entries and cluster.{first}"
                f" {has.format(named[first])}; give one entry per worker, or one of them alone: the"
                " number of workers follows from it"
            )
    n = named[first]
    return {
        **spec,
        "num_workers": n,
        **{name: repeated(name, values, n) for name, values in lists.items()},
    }


def repeated(name: str, values: Sequence[Any], n: int) -> list[Any]:
    """The first `n` of these values over and over; machines are others each time."""
    if name == "node" and all(isinstance(machine, int) for machine in values):
        apart = max(values) + 1
        return [values[i % len(values)] + i // len(values) * apart for i in range(n)]
    return [values[i % len(values)] for i in range(n)]
