"""How plan.json says that operators are divided: what is written is read, mistakes are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.graph.placements.placement import Partial, Placement, Placements, Replicate, Shard
from pipedream.graph.placements.requests import PlacementTexts
from pipedream.graph.placements.strategy_texts import CallPlacements, NodeStrategies

ONE: st.SearchStrategy[Placement] = st.one_of(
    st.just(Replicate()),
    st.just(Partial()),
    st.builds(Shard, st.integers(0, 3), st.integers(1, 4)),
)
TWO: st.SearchStrategy[Placements] = st.tuples(ONE, ONE)


@given(
    inputs=st.lists(TWO, max_size=4),
    outputs=st.lists(st.none() | TWO, min_size=1, max_size=3),
    within=st.none() | TWO,
)
def test_what_is_written_is_read(
    inputs: list[Placements], outputs: list[Placements | None], within: Placements | None
) -> None:
    placements = CallPlacements("aten.mm.default", tuple(inputs), tuple(outputs), within)
    assert CallPlacements.parse(placements.text, 2) == placements


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mm R; R", "operators of b: 'mm R; R': write OPERATOR: INPUTS -> OUTPUTS"),
        (": R -> R", "operators of b: ': R -> R': write OPERATOR"),
        ("mm: R,R; R -> R", "operators of b: R,R has 2 placements for 1 mesh axes"),
        ("mm: R; R -> X", "operators of b: 'X': "),
        ("mm: R; R -> R within R,R", "operators of b: R,R has 2 placements for 1 mesh axes"),
    ],
)
def test_wrong_lines_are_named(line: str, said: str) -> None:
    for passes in ({"forward": (line,)}, {"backward": (line,)}):
        texts = PlacementTexts(operators=(NodeStrategies(nodes=("b",), **passes),))
        with pytest.raises(ValueError, match=r"^operators of b: ") as error:
            texts.requests(1)
        assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("S(0),R", "a: S(0),R has 2 placements for 1 mesh axes"),
        ("P", "a: P is a sum, which only operators can give"),
        ("S", "a: "),
    ],
)
def test_wrong_placements_of_what_is_received_are_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^a: ") as error:
        PlacementTexts(received={"a": text}).requests(1)
    assert str(error.value).startswith(said)
