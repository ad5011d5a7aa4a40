"""Placements as text: each notation reads what it writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.graph.sharding.notation import (
    parse_alpa,
    parse_mindspore,
    parse_placements,
    show_alpa,
    show_mindspore,
    show_placements,
)
from pipedream.graph.sharding.placement import Mesh, Partial, Placements, Replicate, Shard

plain = st.one_of(st.just(Replicate()), st.builds(Shard, st.integers(0, 3)))
every = st.one_of(plain, st.just(Partial()), st.builds(Shard, st.integers(0, 3), st.integers(1, 4)))
meshes = st.lists(st.integers(1, 8), min_size=1, max_size=4).map(tuple)


@given(st.lists(every, min_size=1, max_size=4).map(tuple))
def test_dtensor_says_everything(placements: Placements) -> None:
    assert parse_placements(show_placements(placements)) == placements


@given(st.lists(plain, min_size=1, max_size=4).map(tuple))
def test_alpa_reads_what_it_writes(placements: Placements) -> None:
    assert parse_alpa(show_alpa(placements, 4), len(placements)) == placements


@given(meshes, st.data())
def test_mindspore_reads_what_it_writes(mesh: Mesh, data: st.DataObject) -> None:
    placements = data.draw(st.tuples(*[plain] * len(mesh)))
    assert parse_mindspore(show_mindspore(mesh, placements, 4)) == (mesh, placements)


@pytest.mark.parametrize(
    ("placements", "dtensor", "alpa", "mindspore"),
    [
        ((Shard(0), Replicate()), "S(0),R", "S0R", "(1,-1)"),
        ((Replicate(), Shard(0)), "R,S(0)", "S1R", "(0,-1)"),
        ((Shard(0), Shard(1)), "S(0),S(1)", "S0S1", "(1,0)"),
        ((Shard(1), Shard(1)), "S(1),S(1)", "RS01", "(-1,(1,0))"),
        ((Replicate(), Replicate()), "R,R", "RR", "(-1,-1)"),
    ],
)
def test_one_placement_in_three_notations(
    placements: Placements, dtensor: str, alpa: str, mindspore: str
) -> None:
    mindspore = f"device_matrix (2,4), tensor_map {mindspore}"
    assert show_placements(placements) == dtensor
    assert show_alpa(placements, 2) == alpa
    assert show_mindspore((2, 4), placements, 2) == mindspore


@pytest.mark.parametrize(
    ("text", "placements"),
    [
        ("(S(0), R)", (Shard(0), Replicate())),
        ("P(sum),S( 1,chunks = 3 )", (Partial(), Shard(1, 3))),
    ],
)
def test_spaces_and_parentheses_do_not_matter(text: str, placements: Placements) -> None:
    assert parse_placements(text) == placements


def test_layouts_as_they_are_printed_elsewhere() -> None:
    text = "device_matrix = ( 2, 4 ,), tensor_map = ((1, 0), -1,)"
    assert parse_mindspore(text) == ((2, 4), (Shard(0), Shard(0)))
    assert parse_mindspore("device_matrix (2), tensor_map ()") == ((2,), (Replicate(),))


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("S(0),R", "'S(0),R' is no sharding spec: write R or S"),
        ("SR", "'SR' is no sharding spec"),
        ("", "'' is no sharding spec"),
        ("S2R", "'S2R': there is no mesh axis 2: the mesh has axes 0 to 1"),
        ("S0S0", "'S0S0': mesh axis 0 is named twice"),
        ("S10R", "'S10R': dimension 0 is split by the later axis first: name the axes"),
    ],
)
def test_wrong_sharding_specs_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at
        parse_alpa(text, 2)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(2,4) (1,-1)", "is no layout: write device_matrix (2,4), tensor_map (1,-1)"),
        ("device_matrix (), tensor_map (1,-1)", "is no layout"),
        ("device_matrix (2,0), tensor_map (1,-1)", "is no layout"),
        ("device_matrix (2,4), tensor_map (x)", "is no layout"),
        ("device_matrix (2 4), tensor_map (1)", "is no layout"),
        ("device_matrix (2,4), tensor_map ((1,-1))", "is no layout"),
        ("device_matrix (2,4), tensor_map (2,-1)", "the device matrix has axes 0 to 1, counted"),
        ("device_matrix (2,4), tensor_map (-2,-1)", "write -1 for a dimension that is not"),
        ("device_matrix (2,4), tensor_map (1,1)", "mesh axis 0 is named twice"),
        ("device_matrix (2,4), tensor_map ((0,1),-1)", "split by the later axis first"),
    ],
)
def test_wrong_layouts_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at
        parse_mindspore(text)
    assert message in str(raised.value)


@pytest.mark.parametrize("placement", [Partial(), Shard(0, chunks=3)])
def test_what_a_notation_cannot_say(placement: Partial | Shard) -> None:
    dtensor = show_placements((placement, Replicate()))
    with pytest.raises(ValueError, match="Alpa's notation cannot say") as raised:
        show_alpa((placement, Replicate()), 2)
    assert str(raised.value).endswith(f": write {dtensor}")
    with pytest.raises(ValueError, match="MindSpore's notation cannot say"):
        show_mindspore((2, 2), (placement, Replicate()), 2)
