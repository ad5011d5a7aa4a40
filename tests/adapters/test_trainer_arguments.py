"""PipelineTrainer ignores nothing: what it does not support is refused by name, before training."""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipedream.adapters import trainer_arguments
from pipedream.adapters.trainer_arguments import AS_IN_TRAINER, REFUSED, WITHOUT_EFFECT
from pipedream.capture.errors.user_code import import_torchvision
from pipedream.graph.errors import UserError

KNOWN = AS_IN_TRAINER | WITHOUT_EFFECT | REFUSED.keys()


@cache
def _trainer() -> tuple[Any, Any]:
    """TrainingArguments and PipelineTrainer, whose imports take seconds."""
    import_torchvision()  # where torch is a build without its operators, its own import fails
    from transformers import TrainingArguments

    from pipedream.adapters.transformers import PipelineTrainer

    return TrainingArguments, PipelineTrainer


@pytest.mark.slow
def test_every_field_is_listed_once() -> None:
    """This fails when transformers adds a field: then decide what becomes of it."""
    TrainingArguments, _ = _trainer()
    named = {each.name for each in fields(TrainingArguments) if each.init}
    assert named - KNOWN == set()
    assert len(KNOWN) == len(AS_IN_TRAINER) + len(WITHOUT_EFFECT) + len(REFUSED)


def _message(arguments: Any, kind: Any = None, **given: Any) -> str:
    _, PipelineTrainer = _trainer()
    with pytest.raises(UserError) as error:
        trainer_arguments.check(arguments, given, kind or PipelineTrainer, PipelineTrainer)
    assert "\n" not in error.value.format_message()
    return error.value.format_message()


def _arguments(tmp_path: Path, **given: Any) -> Any:
    TrainingArguments, _ = _trainer()
    return TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **given)


@pytest.mark.parametrize(
    "given",
    [
        {"neftune_noise_alpha": 5.0},
        {"auto_find_batch_size": True},
        {"torch_compile": True},
        {"bf16_full_eval": True},
        {"optim": "galore_adamw_layerwise"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_refused_by_name(given: dict[str, Any], tmp_path: Path) -> None:
    (name,) = given
    assert f"PipelineTrainer: {name}" in _message(_arguments(tmp_path, **given))


def test_what_is_not_a_field_is_refused_by_name(tmp_path: Path) -> None:
    """They were ignored, or ended in a ValueError of clip_grad_norm_."""
    _, PipelineTrainer = _trainer()

    class Own(PipelineTrainer):  # type: ignore[misc, valid-type]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...

    plain = _arguments(tmp_path)
    assert "compute_loss_func is not supported: give loss=" in _message(
        plain, compute_loss_func=len
    )
    assert "a subclass that overrides compute_loss is not" in _message(plain, Own)
    trainer_arguments.check(plain, {"compute_metrics": len}, PipelineTrainer, PipelineTrainer)


def test_a_field_of_a_later_version_is_refused_unless_it_is_left_alone(tmp_path: Path) -> None:
    TrainingArguments, PipelineTrainer = _trainer()
    later = make_dataclass("Later", [("new", int, field(default=0))], bases=(TrainingArguments,))
    both = [later(output_dir=str(tmp_path), use_cpu=True, report_to=[], new=n) for n in (0, 1)]
    trainer_arguments.check(both[0], {}, PipelineTrainer, PipelineTrainer)
    assert "PipelineTrainer: new is not supported" in _message(both[1])
