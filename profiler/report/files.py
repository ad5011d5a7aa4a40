"""The files that pd-profile writes of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipedream.graph.command import write_whole, writing

if TYPE_CHECKING:
    from pipedream.profiler.assembly import Measured


def write_files(measured: Measured, output: Path) -> str:
    """Writes all files of a profile; returns a line that names them."""
    from pipedream.graph.model import format_graph
    from pipedream.graph.placements.operators import write_operators
    from pipedream.graph.profile import write_profile
    from pipedream.graph.shown.draw import draw, why_text
    from pipedream.profiler.report.layers import layers_frame
    from pipedream.profiler.report.layers_picture import draw_layers

    graph, profile, operators = measured.graph, measured.profile, measured.operators
    with writing(output):
        output.mkdir(exist_ok=True)
        write_whole(output / "graph.txt", format_graph(graph))
        write_profile(profile, output / "profile.json")
        if operators is None:
            (output / "operators.json").unlink(missing_ok=True)  # of an earlier run
        else:
            write_operators(operators, output / "operators.json")
        write_whole(output / "layers.csv", layers_frame(profile).to_csv(index=False))
        draw_layers(profile, output / "layers.png")
        picture = draw(graph, output / "graph", profile.title, profile.modules)
    why = why_text(graph, picture)
    traced = ["operators.json"] if operators is not None else []
    names = [f"{output}/graph.txt", "profile.json", *traced, "layers.csv", "layers.png"]
    files = ", ".join([*names, picture.name]) + (f" ({why})" if why else "")
    return files if traced else f"{files}; no operators.json: {profile.no_operators}"
