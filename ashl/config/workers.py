"""Number of workers of an emulated cluster, and its lists of that length."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ashl.errors import UsageError

LISTS = ("compute", "link", "node")
MAX_WORKERS = 100_000


def resize_cluster(spec: Mapping[str, Any], set_keys: Sequence[Collection[str]]) -> dict[str, Any]:
    """Return a cluster's spec with `num_workers` filled in, and every list extended or truncated to
    it.

    Args: `set_keys` has the keys that were set, in descending precedence: on the command line, then
    by an experiment.
    The first of these that gives a number, as `num_workers` or as the length of a list, decides;
    else the option's own values do. A shorter list is repeated, with new nodes for each repetition.
    A spec without lists, or with other errors that the option's constructor reports, is returned
    unchanged.
    Raises: UsageError if lengths differ.
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
        **{name: repeat_list(name, values, n) for name, values in lists.items()},
    }


def repeat_list(name: str, values: Sequence[Any], n: int) -> list[Any]:
    """Return the first `n` values of the endlessly repeated list; each repetition has nodes of its
    own.
    """
    if name == "node" and all(isinstance(machine, int) for machine in values):
        apart = max(values) + 1
        return [values[i % len(values)] + i // len(values) * apart for i in range(n)]
    return [values[i % len(values)] for i in range(n)]
