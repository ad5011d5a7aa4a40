"""A hundred small modules, each trained right or refused: see tests/support/zoo."""

from __future__ import annotations

import re

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from zoo.specimens import zoo
from zoo.survey import survey

from pipedream.runtime.stages.randomness import MinibatchRng

ZOO = zoo()
QUICK = ("2 stages, halves",)
"""The way that touches most: capture, a cut, messages, and programs."""


@pytest.mark.slow
@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", ZOO)
def test_a_module_is_trained_right_or_refused(name: str) -> None:
    torch.set_num_threads(1)
    specimen = ZOO[name]
    found = survey(specimen, *QUICK) or survey(specimen, "whole, halves")  # of one node
    assert found
    assert not {way: str(each) for way, each in found.items() if each.is_wrong}
    refused = [each.line for each in found.values() if each.word == "refused"]
    if specimen.refused is None:
        assert not refused
    else:
        assert refused
        assert all(re.search(specimen.refused, line) for line in refused)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["compiled", "groups", "halves, compiled"])
def test_seeds_are_not_compiled(way: str) -> None:
    """Those of attention without dropout were, in halves, and anew for each minibatch."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    found = survey(ZOO["attention-plain"], way)
    assert not [str(each) for each in found.values() if each.is_wrong]
    assert not _debug_get_cache_entry_list(MinibatchRng.seed_operator.__code__)
