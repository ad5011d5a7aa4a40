"""The trace reads back."""

from __future__ import annotations

import pytest
from played import played

from pipedream.graph.errors import UserError
from pipedream.runtime.report.recording import read_trace, write_trace


def test_trace_reads_back(tmp_path):
    ranks = played((2, 1), 5)
    write_trace(ranks, tmp_path / "trace.csv")
    found = read_trace(tmp_path / "trace.csv")
    assert [e.action for e in found[1]] == [e.action for e in ranks[1]]
    assert found[2][3].begin == pytest.approx(ranks[2][3].begin, abs=1e-9)
    lines = (tmp_path / "trace.csv").read_text().splitlines()
    assert lines[:2] == ["rank,action,begin_seconds,end_seconds", "0,0F0,0.000000000,0.020000000"]


@pytest.mark.parametrize(
    ("text", "where"),
    [("", ":1: "), ("rank,action,begin_seconds,end_seconds\n0,0X0,0,1\n", ":2: ")],
)
def test_bad_trace_is_one_line(tmp_path, text, where):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}{where}")
