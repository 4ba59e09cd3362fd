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
"""


@pytest.mark.parametrize(
    ("overrides", "says", "exit_code"),
    [
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
