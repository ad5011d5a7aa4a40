"""How the devices of a mesh divide each operator of a stage, as plan.json has it.

One line for each call of an operator, in the order in which its node makes them: the operator, how
it wants each tensor that it reads, and how it gives its results.

    aten.addmm.default: S(0),R; R,R; S(1),R -> S(1),R

`-` stands for a result that is not computed; ` within P,R` at the end says how devices have what is
computed in the middle of the operator: they add it up on the axes with P.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from pipedream.graph.errors import ArtifactModel
from pipedream.graph.placements.placement import Placements, parse_placements, show_placements

_WITHIN = " within "


@dataclass(frozen=True)
class CallPlacements:
    """How a call divides its operator: placements for each axis of the mesh. An output is None if
    it is not computed. `within`: of what is computed in the middle; None for whole, or nothing.
    """

    target: str
    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...]
    within: Placements | None = None

    @property
    def text(self) -> str:
        inputs = "; ".join(map(show_placements, self.inputs))
        outputs = "; ".join("-" if o is None else show_placements(o) for o in self.outputs)
        within = "" if self.within is None else _WITHIN + show_placements(self.within)
        return f"{self.target}: {inputs} -> {outputs}{within}"

    @staticmethod
    def parse(text: str, axes: int) -> CallPlacements:
        """Reads the placements of a call on so many axes. Raises ValueError with a message for the
        user.
        """
        target, colon, rest = text.partition(":")
        inputs, arrow, results = rest.partition("->")
        if not colon or not arrow or not target.strip():
            raise ValueError(f"{text!r}: write OPERATOR: INPUTS -> OUTPUTS, such as mm: R; R -> R")
        outputs, _, within = results.partition(_WITHIN)
        return CallPlacements(
            target.strip(),
            tuple(_read(each, axes) for each in _parts(inputs)),
            tuple(None if each == "-" else _read(each, axes) for each in _parts(outputs)),
            _read(within, axes) if within else None,
        )


class NodeStrategies(ArtifactModel):
    """The calls of the nodes that all divide their operators alike, such as those of equal layers,
    by pass.
    """

    nodes: tuple[str, ...] = Field(min_length=1)
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()

    def check(self, axes: int) -> None:
        """Raises ValueError that names a wrong line."""
        for text in (*self.forward, *self.backward):
            try:
                CallPlacements.parse(text, axes)
            except ValueError as error:
                raise ValueError(f"operators of {self.nodes[0]}: {error}") from error


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";")] if text.strip() else []


def _read(text: str, axes: int) -> Placements:
    placements = parse_placements(text)
    if len(placements) != axes:
        raise ValueError(f"{text.strip()} has {len(placements)} placements for {axes} mesh axes")
    return placements
