"""Placements as text: what is written is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.graph.placements.placement import (
    Partial,
    Placements,
    Replicate,
    Shard,
    parse_placements,
    show_placements,
)

plain = st.one_of(st.just(Replicate()), st.builds(Shard, st.integers(0, 3)))
every = st.one_of(plain, st.just(Partial()), st.builds(Shard, st.integers(0, 3), st.integers(1, 4)))


@given(st.lists(every, min_size=1, max_size=4).map(tuple))
def test_dtensor_says_everything(placements: Placements) -> None:
    assert parse_placements(show_placements(placements)) == placements


@pytest.mark.parametrize(
    ("text", "placements"),
    [
        ("(S(0), R)", (Shard(0), Replicate())),
        ("P(sum),S( 1,chunks = 3 )", (Partial(), Shard(1, 3))),
    ],
)
def test_spaces_and_parentheses_do_not_matter(text: str, placements: Placements) -> None:
    assert parse_placements(text) == placements


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("S0,R", "'S0,R': 'S0' is no placement: write S(0), R or P for each mesh axis"),
        ("", "'': '' is no placement"),
        ("S(-1)", "'S(-1)' is no placement"),
        ("S(0, chunks=0)", "is no placement"),
        ("P(avg)", "'P(avg)' is no placement"),
    ],
)
def test_wrong_placements_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at
        parse_placements(text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
