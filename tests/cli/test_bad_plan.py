"""A plan that is handed back: edited by hand, or beside settings that it leaves no say."""

import json

import pytest


@pytest.fixture
def edited(said, workplace):
    """The plan of a run, with its last stage changed by hand."""
    assert said("run.dir=before", "stop.steps=8") == (0, "")
    plan = json.loads((workplace / "before/plan.json").read_text())

    def write(**changes) -> str:
        stage = {
            key: value
            for key, value in {**plan["stages"][-1], **changes}.items()
            if value is not ...
        }
        (workplace / "plan.json").write_text(
            json.dumps({**plan, "stages": [*plan["stages"][:-1], stage]})
        )
        return "plan=plan.json"

    return write


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sync": "bsp"}, "stages.2.sync=bsp is not possible: should be keys and values"),
        ({"sync": ...}, "stages.2.sync is missing; give it a value"),
        ({"snyc": {}}, "stages.2.snyc is not a key; remove it"),
        (
            {"sync": {}},
            (
                "stage shl: sync has no `_target_`; take one of the options that `ashl list sync`"
                " shows"
            ),
        ),
        (
            {"sync": {"_target_": "ashl.sync.asp.ASP"}},
            "stage shl: sync.local_steps is missing; give it a value",
        ),
        (
            {"name": "\x1b[2J"},
            'stages.2.name="\\u001b[2J" is not possible: should be printable text',
        ),
        (
            {"handover": {"momentum": "eat"}},
            "stages.2.handover.momentum=eat is not possible: should be one of keep, reset, drop",
        ),
        (
            {"sync": {"_target_": "ashl.sync.d_psgd.DPSGD", "local_steps": 1, "order": "awc"}},
            "stage shl: sync=d_psgd: needs its pattern of messages",
        ),
    ],
)
def test_a_plan_edited_by_hand(changes, says, said, edited) -> None:
    code, sentence = said(edited(**changes))
    assert code == 2
    assert sentence.startswith(f"plan=plan.json is no usable plan: {says}")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": -5}, "seed=-5 is not possible: should be greater than or equal to 0"),
        ({"num_ranks": 77}, "num_ranks is 77, and its workers and servers are 5"),
        (
            {"predicted_s": float("nan")},
            "predicted_s=nan is not possible: should be a finite number",
        ),
        ({"layers": [["a"]]}, "layers.0.1 is missing; give it a value"),
        ({"notes": "[" * 100_000}, "its brackets are nested too deep"),
    ],
)
def test_a_plan_that_is_none_for_all_its_stages(changes, says, said, edited, workplace) -> None:
    edited()
    text = json.dumps({**json.loads((workplace / "plan.json").read_text()), **changes})
    (workplace / "plan.json").write_text(text.replace('"[', "[") if "[[[" in text else text)
    code, sentence = said("plan=plan.json")
    assert (code, sentence) == (2, f"plan=plan.json is no usable plan: {says}")


def test_a_stage_that_would_never_end(said, edited, workplace) -> None:
    """The run stayed in it permanently, and never mentioned the stages after it."""
    edited()
    plan = json.loads((workplace / "plan.json").read_text())
    assert [stage["name"] for stage in plan["stages"]] == ["profile", "ahl", "shl"]
    assert not plan["stages"][0]["until"], "profiling ends by itself"
    plan["stages"][1]["until"] = {}
    (workplace / "plan.json").write_text(json.dumps(plan))
    says = "stage ahl: until is empty, so stage shl would never begin; set until"
    code, sentence = said("plan=plan.json")
    assert (code, sentence.startswith(f"plan=plan.json is no usable plan: {says}")) == (2, True)


@pytest.mark.parametrize(
    "override", ["sync=bsp", "outer=nesterov", "optimizer.lr=0.5", "planner=balanced"]
)
def test_what_a_given_plan_leaves_no_say(override: str, said, edited) -> None:
    says = (
        f"{override}: no effect, plan=plan.json sets the options of each stage; remove it, or make"
        " a new plan without plan="
    )
    assert said(edited(), override) == (2, says)


def test_a_given_plan_for_another_batch(said, edited) -> None:
    code, sentence = said(edited(), "dataset.batch_size=16")
    assert code == 2
    assert "is for another run: batch 32 there, 16 here" in sentence


def test_a_given_plan_with_another_seed(said, edited, workplace) -> None:
    ran = {}
    for name, *more in (("same",), ("other", "seed=3")):
        assert said(edited(), f"run.dir={name}", "stop.steps=8", "optimizer.lr=0.1", *more) == (
            0,
            "",
        )
        ran[name] = json.loads((workplace / name / "summary.json").read_text())
    assert (ran["same"]["seed"], ran["other"]["seed"]) == (0, 3)
    assert ran["same"]["params_sha256"] != ran["other"]["params_sha256"]
