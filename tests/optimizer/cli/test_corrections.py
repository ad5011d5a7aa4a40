"""The corrections for late gradients whose memory a plan counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from broken.whole_files import plan_json
from schedules import schedule

from pipedream.graph.choices import ScheduleName
from pipedream.graph.errors import UserError
from pipedream.graph.plan import DraftPlan
from pipedream.optimizer.cli.asked.corrections import corrections_of
from pipedream.optimizer.cli.asked.memory import zero_of
from pipedream.optimizer.cli.options import Options

ASKED = Options(graph=Path("graph.txt"))


@pytest.mark.parametrize(
    ("options", "schedule_name", "message"),
    [
        (
            {"error_feedback": True},
            "flush",
            "--error-feedback is for 2bw, weight-stashing,",
        ),
        ({"weight_prediction": True}, "2bw", "--weight-prediction is for weight-stashing, and"),
        (
            {"weight_prediction": True, "error_feedback": True},
            "weight-stashing",
            "--weight-prediction and --error-feedback are not to be had together",
        ),
        ({"basis_rotation": True, "optimizer": "momentum"}, "2bw", "a form of Adam"),
        ({"basis_rotation": True, "mesh": "2"}, "2bw", "bases are of whole matrices"),
        ({"basis_rotation": True}, "2bw", "profile.json does not say what bases take"),
    ],
)
def test_what_a_run_would_refuse_is_not_planned(
    options: dict[str, object], schedule_name: ScheduleName, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        corrections_of(replace(ASKED, **options), schedule_name, None)  # type: ignore[arg-type]


def test_replicas_do_not_divide_bases_and_do_divide_steps_to_be_made_good() -> None:
    assert zero_of(replace(ASKED, error_feedback=True)) == "auto"
    assert zero_of(replace(ASKED, basis_rotation=True)) == "never"
    with pytest.raises(UserError, match="and --basis-rotation needs all of it"):
        zero_of(replace(ASKED, basis_rotation=True, zero="always"))


@pytest.mark.parametrize(
    ("field", "corrections"), [(True, ("weight_prediction",)), (False, None), (None, None)]
)
def test_plans_that_named_one_correction_are_read(
    field: bool | None, corrections: tuple[str, ...] | None
) -> None:
    text = plan_json()
    text.pop("corrections", None)
    assert DraftPlan.model_validate({**text, "weight_prediction": field}).corrections == corrections


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", ["weight-stashing", "vertical-sync", "2bw"])
def test_as_many_steps_are_kept_as_there_are_older_versions(name: str, stages: int) -> None:
    """Error feedback keeps a step from its update to the one that makes it good."""
    whole = schedule(name, (1,) * stages, [(s, s + 1) for s in range(stages - 1)], 40)
    for stage in range(stages):
        made_good = whole.makes_good(stage)
        most = max(
            sum(step <= update < good for good, step in made_good.items())
            for update in range(whole.rounds(stage))
        )
        assert most == whole.policy.peak(stage).versions - 1, stage
