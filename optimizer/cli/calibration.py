"""Planning with the times that runs took (`--calibrate`), on single devices and on meshes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import OperatorProfile
from pipedream.graph.plan import Plan
from pipedream.graph.profile import Profile
from pipedream.optimizer.calibrate.price_plan import Price, price_plan
from pipedream.optimizer.calibrate.runs import CalibrationRun, DividedWork, calibrated
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.cli.inputs import operators_of
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.sharding.planned_views import device_work, planned_views, priced_again
from pipedream.optimizer.sharding.views import Views


@dataclass(frozen=True)
class Calibration:
    """`runs`: the newest last, and `works`: of each what devices of its meshes did, None of those
    without. `profile`, `operators`: of the graph; operators only if a run has divided them.
    """

    runs: Sequence[CalibrationRun]
    works: Sequence[DividedWork | None]
    profile: Profile | None
    operators: OperatorProfile | None

    @staticmethod
    def of(
        runs: Sequence[CalibrationRun],
        request: Request,
        options: Options,
        profile: Profile | None,
    ) -> Calibration:
        """`request`: with the graph as profiled. Raises UserError if the operators that a run
        divided are not known.
        """
        meshed = next((run for run in runs if _is_on_mesh(run.measured.plan)), None)
        operators = None if meshed is None or profile is None else operators_of(options)
        fingerprint = None if operators is None else operators.fingerprint
        if meshed is not None and fingerprint != request.graph.fingerprint:
            raise UserError(
                f"--calibrate {meshed.folder}: its stages were on meshes of devices, and there is"
                f" no {options.graph_path.with_name('operators.json')} of this graph: pd-profile"
                " writes it with graph.txt"
            )
        found = Calibration(runs, (), profile, operators)
        return replace(found, works=[found._work(run.measured.plan, request) for run in runs])

    def corrected(self, request: Request) -> Request:
        """The request with the times of the runs, and what the allocator took in the newest."""
        if not self.runs:
            return request
        ratios = [run.gaps for run in self.runs if run.gaps is not None]
        if ratios and request.process is not None:
            request = replace(request, process=request.process.scaled(ratios[-1]))
        graph = calibrated(request.graph, self.runs, self.profile, request.overheads, self.works)
        return replace(request, graph=graph)

    def priced(self, plan: Plan, request: Request) -> Price:
        """What a run's plan takes now. Raises UserError where that cannot be said."""
        if not _is_on_mesh(plan):
            return price_plan(plan, replace(request, groups=()))
        return Price.recorded_in(priced_again(plan, *self._views(plan, request)).plan)

    def _work(self, plan: Plan, request: Request) -> DividedWork | None:
        return DividedWork(*device_work(*self._views(plan, request))) if _is_on_mesh(plan) else None

    def _views(self, plan: Plan, request: Request) -> tuple[Views, Division]:
        """Of a plan that was made for its own cluster, and may have cut what are groups now."""
        assert self.operators is not None
        assert self.profile is not None
        own = replace(request, cluster=plan.cluster, groups=())
        return planned_views(plan, own, self.operators, self.profile)


def _is_on_mesh(plan: Plan) -> bool:
    return any(stage.mesh is not None for stage in plan.stages)
