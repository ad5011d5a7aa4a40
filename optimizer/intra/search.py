"""A sharding of a graph's operators on a mesh, by one of the searches, and how good it is.

- exact: message passing and elimination, with proof (`exact`);
- cones: the same for clusters of operators that are divided alike (`cones`; EasyDist);
- propagate: from what the user wants, operator by operator (`sharding.propagate`; MindSpore);
- recursive: halving the machine again and again, on relative costs (`recursive`; MindSpore).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipedream.graph.choices import IntraOp
from pipedream.optimizer.intra.cones import cones
from pipedream.optimizer.intra.costs import StageProblem
from pipedream.optimizer.intra.solver.exact import solve
from pipedream.optimizer.intra.solver.messages import Messages
from pipedream.optimizer.recursive.search import recursive
from pipedream.sharding.assignment import Assignment
from pipedream.sharding.propagate import propagate

_SWEEPS = 20
"""Of message passing, for the bound of a search that has none."""


@dataclass(frozen=True)
class Sharding:
    """`seconds` of a minibatch on each device, as `StageProblem` counts, and a `bound` that no
    sharding of the graph on the mesh takes less than. `tied`: seconds of the best one that is the
    same for all equal layers (`ties`), if that was found. `of_stages`: of a model's stages on the
    mesh, each by itself.
    """

    assignment: Assignment
    method: IntraOp
    seconds: float
    bound: float
    tied: float | None = None
    of_stages: bool = False

    @property
    def gap(self) -> float:
        """By how much more than the bound it takes, as a part of it; 0 if nothing is better."""
        gap = self.seconds / self.bound - 1 if self.bound > 0 else 0.0
        return gap if gap > 1e-7 else 0.0


def find_sharding(stage: StageProblem, method: IntraOp, seconds: float = 30.0) -> Sharding | None:
    """The best sharding found, in about so many seconds; None if none keeps the limit of bytes.
    `method`: auto is exact.

    Raises UserError for requests that cannot be met.
    """
    if method in ("auto", "exact"):
        choice = solve(stage.problem, seconds)
        if choice.labels is None:
            return None
        tied = choice.tied.seconds if choice.tied is not None and choice.tied.proven else None
        assignment = stage.assignment(choice.labels)
        return Sharding(assignment, "exact", choice.seconds, choice.bound, tied)
    messages = Messages.of(stage.problem)
    messages.sweep(_SWEEPS)
    given = stage.graph, stage.mesh, stage.requests, stage.seconds
    if method == "cones":
        joined = cones(stage.problem)
        choice = solve(joined.problem, seconds)
        if choice.labels is None:
            return None
        assignment = stage.assignment(joined.expanded(choice.labels))
    elif method == "propagate":
        assignment = propagate(*given)
    else:
        assignment = recursive(*given, minibatches=stage.accounting.minibatches)
    taken = stage.seconds_of(assignment)
    return Sharding(assignment, method, taken, min(taken, messages.bound()))
