"""Rules and codecs of the user's own that do not fit: one sentence that names them, and the right
exit code.
"""

import pytest

RULES = """
from ashl.compression.contract import Traits, Wrappable
from ashl.option import option
from ashl.topology.parameter_server import ServerRule

@option
class Short(ServerRule):
    def quorum(self):
        return 1

@option
class Silent(Wrappable):
    code = 200
    traits = Traits()

@option
class Unmade(ServerRule):
    staleness: int
    local_steps: int

    def __post_init__(self):
        raise ValueError("not like this")

@option
class Raising(ServerRule):
    staleness: int
    local_steps: int

    def may_proceed(self, state, tally):
        raise ValueError("not now")

@option
class Stranger(ServerRule):
    local_steps: int

    def may_proceed(self, state, tally):
        return [99]

from ashl.aggregate.weighted import Weighted
from ashl.planner.assignment import Planner, assignments, costs_of

@option
class Unweighed(Weighted):
    def weigh(self, workers):
        return None

@option
class Weightless(Weighted):
    def weigh(self, workers):
        return [0] * len(workers)

@option
class Unassigned(Planner):
    h_max: int | None

    def assign(self, profile, h_preset, r_preset, payload):
        return (1, 2)

@option
class Halves(Planner):
    h_max: int | None

    def assign(self, profile, h_preset, r_preset, payload):
        costs = costs_of(profile, encoded=False)
        return assignments(costs, [1.5] * len(costs), [1.0] * len(costs), payload)

@option
class NotAList(ServerRule):
    local_steps: int

    def may_proceed(self, state, progress):
        return None

@option
class Nobody(ServerRule):
    local_steps: int

    def may_proceed(self, state, progress):
        return []
"""


@pytest.mark.parametrize(
    ("overrides", "says", "exit_code"),
    [
        (
            "aggregate=uniform aggregate._target_=my_rules.Unweighed",
            "aggregate my_rules.Unweighed: weigh() should return a finite number for each of",
            2,
        ),
        (
            "aggregate=uniform aggregate._target_=my_rules.Weightless",
            "with a sum other than 0, and returned [0, 0",
            2,
        ),
        (
            "planner=balanced planner._target_=my_rules.Unassigned sync=local_sgd"
            " sync.local_steps=plan schedule.h_preset=[4]",
            "planner my_rules.Unassigned: assign() should return an Assignment for each of",
            2,
        ),
        (
            "planner=balanced planner._target_=my_rules.Halves sync=local_sgd"
            " sync.local_steps=plan schedule.h_preset=[4]",
            "gives worker 0 local_steps=1.5; give a whole number from 1 on",
            2,
        ),
        (
            "sync=asp sync._target_=my_rules.NotAList",
            "a part of your own (my_rules) may have returned a wrong value",
            1,
        ),
        (
            "sync=asp sync._target_=my_rules.Nobody",
            "a part of your own (my_rules) may be the cause, for example a may_proceed that names",
            1,
        ),
        (
            "sync._target_=my_rules.Unmade",
            "sync names my_rules.Unmade, which cannot be made: not like this",
            2,
        ),
        ("sync._target_=my_rules.Raising", "my_rules.py, line 30)", 1),
        (
            "sync=asp sync._target_=my_rules.Stranger",
            "'my_rules.Stranger' lets worker 99 go on, which does not wait",
            2,
        ),
        (
            "sync._target_=my_rules.Short",
            (
                "sync names 'my_rules.Short'; its 'quorum' cannot be called; write it as"
                " quorum(self, num_workers)"
            ),
            2,
        ),
        (
            "sync=bsp compression=natural compression._target_=my_rules.Silent",
            ("'my_rules.Silent' does not define 'encoded_nbytes', which has no default; define it"),
            2,
        ),
    ],
)
def test_a_hook_of_the_users_own_that_does_not_fit(
    overrides, says, exit_code, said, workplace, monkeypatch
) -> None:
    """2 where it cannot be made; where it fails, the run has failed, on processes as in virtual
    time.
    """
    (workplace / "my_rules.py").write_text(RULES)
    monkeypatch.syspath_prepend(workplace)
    code, sentence = said(*overrides.split(), "allow_targets=[my_rules]")
    assert says in sentence
    assert code == exit_code
