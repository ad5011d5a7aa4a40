"""What is found by running operators beside what the rules say, over whole models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipedream.graph.placements.operators import Operator, Way, read_operators
from pipedream.profiler.cli import main
from pipedream.profiler.discovery.known import discover
from pipedream.sharding.rules import RULES, strategies
from pipedream.sharding.rules.discovered import as_way

WRITES = ("aten.native_batch_norm",)
"""It writes its statistics, and devices that divide the batch add up within it: not searched."""
UNREAD = ("aten.native_batch_norm_backward",)
"""Of inputs that it does not read, rules divide some with others; the search leaves them whole."""
FURTHER = {
    "aten.native_layer_norm": "weight and bias together may be terms of a sum",
    "aten.native_layer_norm_backward": "so may the weight, for the gradient of the input alone",
}
"""Families of which more is found than the rules say, all of it right."""
EVEN = "rules know for which numbers of devices parts end where others do; what is found is for any"
FEWER = {
    "aten.view": EVEN,
    "aten._unsafe_view": EVEN,
    "aten.ones": "it reads nothing, and the search divides what is read",
    "aten.convolution_backward": "of a weight that is not read, rules take terms",
}
"""Families of which less is found, beside ways in chunks."""


@pytest.mark.thorough
@pytest.mark.timeout(900)  # two profiles of two minutes each, on an idle machine
def test_operators_of_gpt2_and_resnet50(tmp_path: Path) -> None:
    found = discover(list(_operators(tmp_path)), tmp_path)
    same, missing, further = 0, Counter[str](), Counter[str]()
    for operator, (ways, _) in found.items():
        if operator.family.startswith((*WRITES, *UNREAD)):
            continue
        ruled = {_known(operator, as_way(each)) for each in strategies(operator, 2)[1:]}
        own = {_known(operator, each) for each in ways}
        same += len(ruled & own)
        further[operator.family] += len(own - ruled)
        # How many chunks there are depends on sizes, which are other ones on a device.
        missing[operator.family] += sum("chunks" not in repr(each) for each in ruled - own)
    assert +further == {name: number for name, number in further.items() if name in FURTHER}
    assert (+missing).keys() <= FEWER.keys()
    assert same / (same + further.total() + missing.total()) >= 0.95


def _operators(folder: Path) -> Iterator[Operator]:
    seen = set()
    for name, model, batch in (
        ("gpt2", "transformers:gpt2", "2"),
        ("resnet50", "torchvision:resnet50", "8"),
    ):
        options = [model, "--batch-size", batch, "-o", str(folder / name), "--repeats", "1"]
        assert CliRunner().invoke(main, options).exit_code == 0
        for call in read_operators(folder / name / "operators.json").graph.calls:
            bare = call.operator.model_copy(update={"ways": ()})
            if bare not in seen:
                seen.add(bare)
                yield bare


def _known(operator: Operator, way: Way) -> Way:
    """A placement of what is not computed means nothing."""
    pairs = zip(way.outputs, operator.outputs, strict=True)
    return way.model_copy(update={"outputs": tuple("R" if t is None else w for w, t in pairs)})


def test_every_family_of_the_lists_is_known() -> None:
    assert {*WRITES, *UNREAD} <= RULES.keys()
