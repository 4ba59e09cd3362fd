"""Composition: every option composes; what does not ends in one sentence with the nearest right
spelling.
"""

import random

import pytest

from ashl.config import compose as module
from ashl.config.catalog import CONF, catalog
from ashl.config.compose import LINKS, PRESETS, compose
from ashl.errors import UsageError
from tests.support import slow_unless


def message(*overrides: str, config_dir=None) -> str:
    with pytest.raises(UsageError) as caught:
        compose(overrides, config_dir)
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.exit_code == 2
    return text


@pytest.fixture
def mine(tmp_path):
    """A user's own folder of options; its name has what shells and parsers stumble over."""

    def write(path: str, text: str):
        file = tmp_path / "it's mine, too" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode("latin-1"))
        return tmp_path / "it's mine, too"

    return write


VALUES = ("seed", "name", "plan", "profile", "sweep", "allow_targets", "run", "stop", "eval")


def lines() -> list[dict[str, str]]:
    """Lines with an option of every group, in which each option stands at least once; presets by
    themselves.
    """
    groups = {group: list(options) for group, options in catalog().items() if group not in PRESETS}
    longest = max(map(len, groups.values()))
    together = [
        {group: options[k % len(options)] for group, options in groups.items()}
        for k in range(longest)
    ]
    return [*together, *({group: option} for group in PRESETS for option in catalog()[group])]


@pytest.mark.parametrize("chosen", lines(), ids=lambda chosen: "-".join(chosen.values())[:60])
def test_every_option_composes(chosen: dict[str, str]) -> None:
    config = compose([f"{group}={option}" for group, option in chosen.items()])
    assert set(config) == {"choices", *catalog(), *VALUES} - set(PRESETS)
    names = config["choices"]["schedule"] != "single" and "sync" not in config["choices"]
    mute = {"sync"} if names else set()  # those stages have sync modes of their own
    assert all(
        config["choices"][group] == option for group, option in chosen.items() if group not in mute
    )
    assert {*catalog()} - set(PRESETS) - mute <= set(config["choices"]) <= {*catalog()} - mute


@pytest.mark.parametrize("seed", slow_unless([0, 1], range(40)))
def test_options_put_together_are_as_hydra_composes_them(seed: int) -> None:
    """A draw of options has the values that Hydra gives it."""
    draw = random.Random(seed)
    groups = {group: list(options) for group, options in catalog().items() if group not in PRESETS}
    drawn = draw.sample(list(groups), 7)
    options = tuple(f"{group}={draw.choice(groups[group])}" for group in sorted(drawn))
    composed, choices = module._compose(options, None, catalog())
    expected = module._compose_by_hydra(options, None)
    assert (list(composed.items()), choices) == (list(expected[0].items()), expected[1])


def test_no_other_option_reaches_out() -> None:
    """The files of all other options can be read without Hydra: they choose no option of another
    group.
    """
    files = [file for file in CONF.glob("*/[!_]*.yaml") if file.parent.name in catalog()]
    others = [file for file in files if file.parent.name not in module.CHOOSERS]
    assert len(others) > 150
    assert not [file for file in others if module._load_option(file, 0) is None]


def test_choices_are_those_that_the_composition_ended_with() -> None:
    choices = compose(["debug=fast", "model=resnet20"])["choices"]
    assert (choices["model"], choices["debug"], choices["cluster"]) == (
        "resnet20",
        "fast",
        "homogeneous",
    )
    assert (choices["schedule"], choices["compression"]) == ("ashl", "topk")
    assert "experiment" not in choices
    assert compose(["sync=bsp"])["choices"]["schedule"] == "single"


def test_values_are_overridden() -> None:
    config = compose(
        [
            "sync=bsp",
            "seed=7",
            "cluster.compute=[1,2]",
            "stop={steps: 5}",
            "name='a, b'",
            "cluster.compute.1=9",
        ]
    )
    assert config["sync"]["_target_"] == "ashl.sync.bsp.BSP"
    assert (config["seed"], config["cluster"]["compute"], config["name"]) == (7, [1, 9], "a, b")
    assert (config["stop"]["steps"], config["stop"]["target_consecutive_evals"]) == (5, 1)
    assert compose(["cluster.events=[{time_s: 1, worker: 0}]"])["cluster"]["events"] == [
        {"time_s": 1, "worker": 0}
    ]


def test_plus_signs_mean_nothing() -> None:
    assert compose(["+sync=bsp", "++seed=3", "+debug=fast"]) == compose(
        ["sync=bsp", "seed=3", "debug=fast"]
    )


def test_the_environment_names_the_data_root(monkeypatch) -> None:
    monkeypatch.setenv("ASHL_DATA", "/somewhere")
    assert compose(["dataset=mnist"])["dataset"]["root"] == "/somewhere"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("sync=spp", "did you mean ssp?"),
        ("sync=SSP", "did you mean ssp?"),
        ("sync=", "There is no sync ''; `ashl list sync` shows what"),
        ("snyc=ssp", "There is no key snyc; did you mean sync?"),
        ("sync.stalenes=3", "There is no key sync.stalenes; did you mean sync.staleness?"),
        ("sync=bsp sync.stalness=3", "did you mean sync.staleness, a key of sync="),
        ("optmizer.lr=3", "There is no key optmizer.lr; did you mean optimizer.lr?"),
        ("choices.model=mlp", "There is no key choices.model; did you mean model?"),
        ("lr=3", "There is no key lr; did you mean optimizer.lr?"),
        ("target=0.9", "There is no key target; did you mean stop.target_accuracy?"),
        ("worker=3", "There is no key worker; did you mean cluster.num_workers?"),
        ("model.foo=3", "There is no key model.foo; model=mlp has hidden."),
        ("optimizer.lr={a:3}", "optimizer.lr takes one value, not keys; write optimizer.lr=VALUE"),
        ("stop.foo=3", "There is no key stop.foo; stop has epochs, steps, seconds, "),
        ("cluster.foo=3", "There is no key cluster.foo; `ashl list cluster mixed` shows"),
        ("++new.key=3", "There is no key new.key"),
        ("+sync.bound=3", "There is no key sync.bound"),
        ("cluster.compute.a=3", "cluster.compute.a=3 cannot be set: a list or a single value"),
        ("cluster.compute.x.y=3", "cluster.compute.x.y=3 cannot be set: a list or a single value"),
        ("allow_targets={a:1}", "allow_targets={a:1} cannot be set: a list or a single value"),
        (
            "allow_targets=true",
            "allow_targets=True is not a list; write it like 'allow_targets=[mypackage]'",
        ),
        ("sync=bsp sync.staleness=3", "sync=bsp has no key staleness; these have one: "),
        ("stop=3", "stop is no value but a group of them: stop.epochs, "),
        (
            "seed=1,2",
            "seed=1,2 gives several values where train takes one; use `ashl sweep seed=1,2`",
        ),
        ("cluster.compute=1,2", "or write a list as 'cluster.compute=[1,2]'."),
        ("seed=range(1,3)", "use `ashl sweep 'seed=range(1,3)'`."),
        ("sync=bsp,ssp", "use `ashl sweep sync=bsp,ssp`"),
        ("ssp", "'ssp' is not of the form KEY=VALUE; did you mean sync=ssp?"),
        ("=3", "'=3' is not of the form KEY=VALUE"),
        ("seed", "'seed' is not of the form KEY=VALUE, without blanks around =, as in "),
        ("stop.=3", "'stop.=3' is not of the form KEY=VALUE"),
        ("seed=[", "seed=[ cannot be read"),
        ("run.dir=/tmp/(x)", "quote the value twice, as in 'run.dir=\"/tmp/(x)\"'."),
        ("~seed", "cannot be taken away"),
        ("hydra.run.dir=x", "Hydra's own settings"),
        ("hydra.searchpath=[x]", "--config-dir"),
        ("sync@model=bsp", "Hydra's own settings"),
        ("name=${nope}", "name: its ${...} refers to no value; write a value, or another key"),
        ("name=${oc.decode:a[}", "name: its ${...} refers to no value"),
        ("seed=???", "seed: ??? stands for a missing value; give it one, or null"),
        ("stop={epochs:???}", "stop={epochs:???}: ??? stands for a missing value"),
        ("run=[]", "run is no value but a group of them: run.dir, "),
        ("debug=fast cluster=real", "debug=fast: cluster=real has no key compute"),
    ],
)
def test_what_is_wrong_is_said(overrides: str, says: str) -> None:
    assert says in message(*overrides.split())


def test_own_options_are_found(mine) -> None:
    folder = mine("sync/mine.yaml", "defaults: [ssp]\nstaleness: 7 # own\n")
    mine(
        "experiment/both.yaml",
        "# @package _global_\ndefaults:\n  - override /sync: mine\nname: s${sync.staleness}\n",
    )
    config = compose(["experiment=both"], folder)
    assert (config["sync"]["staleness"], config["sync"]["local_steps"], config["name"]) == (
        7,
        1,
        "s7",
    )
    assert compose(["experiment=both", "sync.staleness=9"], folder)["name"] == "s9"
    assert "did you mean mine?" in message("sync=min", config_dir=folder)


@pytest.mark.parametrize(
    ("path", "text", "override", "says"),
    [
        ("model/a.yaml", "x: [1\ny: 2\n", "model=a", "model/a.yaml, line 2, is not valid YAML"),
        ("model/a.yaml", "x: 1\nx: 2\n", "model=a", "x is twice in one mapping"),
        ("sync/a b.yaml", "staleness: 1\n", "seed=1", "rename it, as in my_option.yaml"),
        ("sync/On.yaml", "staleness: 1\n", "seed=1", "rename it, as in my_option.yaml"),
        (
            "model/a.yaml",
            "x: {<<: [&a {k: 1}, &b {k: 1}]}\n",
            "model=a",
            "line 1, is not valid YAML: k is twice in one mapping",
        ),
        (
            "model/a.yaml",
            "x:\n  y: &a {k: 1}\n  z: {<<: [*a, *a]}\n",
            "model=a",
            "line 3, is not valid YAML: k is twice in one mapping",
        ),
        ("model/a.yaml", "k: 1\nk: 2\n", "model=a", "line 2, is not valid YAML: k is twice"),
        ("model/a.yaml", "a: &a\n  <<: *a\n", "model=a", "`<<` merges other mappings only"),
        (
            "model/a.yaml",
            "steps: 2020-99-99\n",
            "model=a",
            "a.yaml has a value that YAML cannot read",
        ),
        ("model/a.yaml", "x: \xff\n", "model=a", "not text in UTF-8"),
        (
            "model/a.yaml",
            "x: 1\ny: &a\n  z: *a\n",
            "model=a",
            "line 2, is not valid YAML: this anchor",
        ),
        (
            "model/a.yaml",
            f"x: {'[' * 3000}{']' * 3000}\n",
            "model=a",
            "nest",
        ),
        (
            "experiment/a.yaml",
            "defaults: [{override /sync: 1}]\n",
            "experiment=a",
            "names an option that is not text",
        ),
        ("model/a.yaml", "- 1\n", "model=a", "must hold keys and values"),
        ("sync/ssp.yaml", "staleness: 1\n", "sync=ssp", "rename it, as in my_ssp.yaml"),
        ("snyc/a.yaml", "x: 1\n", "snyc=a", "There is no group 'snyc'"),
        (
            "experiment/a.yaml",
            "seed: 3\n",
            "experiment=a",
            "must begin with the line `# @package _global_`",
        ),
        (
            "experiment/a.yaml",
            "# @package _global_\nsed: 3\n",
            "experiment=a",
            "experiment=a: There is no key sed",
        ),
        (
            "experiment/a.yaml",
            "# @package _global_\ndefaults:\n  - override /sync: spp\n",
            "experiment=a",
            "There is no sync 'spp'",
        ),
    ],
)
def test_own_files_with_faults(mine, path: str, text: str, override: str, says: str) -> None:
    assert says in message(override, config_dir=mine(path, text))


def test_hidden_files_and_broken_links_are_no_options(mine) -> None:
    """Editors and other systems leave them."""
    folder = mine("sync/._mine.yaml", "not: [an option")
    (folder / "sync/.#mine.yaml").symlink_to("nowhere")
    (folder / "sync/mine.yaml").symlink_to("nowhere")
    assert "mine" not in catalog(folder)["sync"]
    assert compose(["sync=bsp"], folder)


def test_a_file_that_an_own_option_starts_from_is_looked_at_too(mine) -> None:
    mine("model/_base.yaml", "x: {<<: [&a {k: 1}, &b {k: 2}]}\n")
    folder = mine("model/mine.yaml", "defaults: [_base]\ny: 1\n")
    assert "_base.yaml, line 1, is not valid YAML: k is twice in one mapping" in message(
        "model=mine", config_dir=folder
    )


@pytest.mark.parametrize("key", slow_unless(LINKS[:1], LINKS))
def test_links_of_an_own_cluster_that_an_inherited_exchange_hides_are_refused(
    key: str, mine
) -> None:
    mine("cluster/desk.yaml", f"defaults: [homogeneous]\n{key}: 0.5\n")
    folder = mine("cluster/lab.yaml", "defaults: [desk]\ncompute: [1, 2]\n")
    for cluster in ("desk", "lab"):
        said = message(f"cluster={cluster}", config_dir=folder)
        assert f"desk.yaml: {key} has no effect" in said
        assert "`exchange_s: null`" in said
        assert (
            compose([f"cluster={cluster}", "cluster.exchange_s=null"], folder)["cluster"][key]
            == 0.5
        )
        assert (
            compose([f"cluster={cluster}", "cluster.exchange_s=0.5"], folder)["cluster"][
                "exchange_s"
            ]
            == 0.5
        )
    mine("cluster/desk.yaml", f"defaults: [homogeneous]\nexchange_s: null\n{key}: 0.5\n")
    assert compose(["cluster=lab"], folder)["cluster"][key] == 0.5
    preset = f"# @package _global_\ncluster: {{{key}: 0.5}}\n"
    folder = mine("experiment/slow.yaml", preset)
    assert f"slow.yaml: {key} has no effect" in message("experiment=slow", config_dir=folder)
    folder = mine("experiment/slow.yaml", preset.replace("{", "{exchange_s: null, "))
    assert compose(["experiment=slow"], folder)["cluster"][key] == 0.5


def test_an_own_key_may_replace_a_merged_one(mine) -> None:
    """All YAML readers take the second of these two."""
    folder = mine(
        "model/mine.yaml", "_target_: mine.Model\nx: &a {k: 1, m.n: 1}\ny: {m.n: 2, <<: *a, k: 2}\n"
    )
    assert compose(["model=mine"], folder)["model"]["y"] == {"m.n": 2, "k": 2}


def test_config_dir_that_is_not_there(tmp_path) -> None:
    assert "there is no such folder" in message(config_dir=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("overrides", "compute", "link", "node"),
    [
        ("cluster.compute=[1,2,3]", [1, 2, 3], [1, 1, 2], None),
        ("cluster.link=[4,5]", [1, 1.5], [4, 5], None),
        ("cluster.num_workers=2", [1, 1.5], [1, 1], None),
        ("cluster.num_workers=6", [1, 1.5, 2, 3, 1, 1.5], [1, 1, 2, 2, 1, 1], None),
        ("cluster=homogeneous cluster.num_workers=8", [1] * 8, None, None),
        ("cluster=homogeneous cluster.compute=[1,2] cluster.num_workers=2", [1, 2], None, None),
        ("cluster=four_nodes cluster.num_workers=18", [1] * 18, None, [i // 4 for i in range(18)]),
        ("cluster=four_nodes_5x cluster.node=[0,1]", [1, 1], None, [0, 1]),
        ("experiment=ashl_table cluster.num_workers=4", [2, 3, 4, 2], [4, 6, 8, 4], None),
        ("debug=fast cluster=mixed", [1, 1], [1, 1], None),
        ("debug=fast cluster=mixed cluster.num_workers=3", [1, 1, 1], [1, 1, 2], None),
    ],
)
def test_one_number_or_one_list_says_how_many_workers_there_are(
    overrides: str, compute, link, node
) -> None:
    cluster = compose(overrides.split())["cluster"]
    assert (cluster["compute"], cluster["link"], cluster["node"]) == (compute, link, node)
    assert cluster["num_workers"] == len(compute)


def test_an_experiment_says_it_too_and_the_command_line_before_it(mine) -> None:
    folder = mine("experiment/six.yaml", "# @package _global_\ncluster:\n  num_workers: 6\n")
    mine("experiment/three.yaml", "# @package _global_\ncluster:\n  link: [1, 2, 3]\n")
    mine("cluster/two.yaml", "defaults: [homogeneous]\nnum_workers: 2\n")
    asked = (
        "experiment=six",
        "experiment=six cluster.compute=[1,2]",
        "experiment=three",
        "cluster=two",
    )
    assert [compose(text.split(), folder)["cluster"]["num_workers"] for text in asked] == [
        6,
        2,
        3,
        2,
    ]
