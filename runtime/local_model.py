"""One rank of a run before it meets the others: its examples, its stage of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch.nn import Parameter

from pipedream.capture.export import Captured
from pipedream.capture.loss import load_loss
from pipedream.capture.segment import Segment
from pipedream.comm.launcher import Place
from pipedream.comm.rendezvous import choose_device
from pipedream.graph.errors import UserError
from pipedream.runtime.data.examples import Examples
from pipedream.runtime.engine.randomness import MinibatchRng, operator_positions, seed_each
from pipedream.runtime.engine.training_segment import whole_updates
from pipedream.runtime.job import Job
from pipedream.runtime.optim.optimizers import make_optimizer, state_tensors
from pipedream.runtime.optim.rates import LearningRate
from pipedream.runtime.optim.stepping import Stepping
from pipedream.runtime.report.loss_sum import LossSum
from pipedream.runtime.stages.captures import Captures, capture_all
from pipedream.runtime.stages.compile import Compute, make_compute
from pipedream.runtime.stages.partition import Layout, layouts, links, source_text, tied
from pipedream.runtime.stages.stage_module import StageModule, StageModules
from pipedream.schedule.action import Action
from pipedream.schedule.schedule import Schedule


class LocalModel:
    """All ranks build the same model from the same seed, then keep their stage.

    `stage_modules` compute the stage; `parameters` and `buffers` are what a checkpoint has of it.
    """

    def __init__(self, job: Job, place: Place) -> None:
        self.job, self.place = job, place
        self.worker = job.worker(place.rank)
        self.stage, self.replica = self.worker
        self.device, self.backend = choose_device(job.device, place)
        self.examples = Examples(job, self.device)
        self._build(capture_all(job, self.examples, place))

    def _build(self, captures: Captures) -> None:
        """Keeps this rank's stage of the captured model; the others may go."""
        job, captured = self.job, captures.whole
        self.layouts: Sequence[Layout] = layouts(captured, job.plan)
        self.tied = tied(captured, self.layouts)
        self._check_tied()
        self.layout = self.layouts[self.stage]
        if self.replica == 0:
            job.run.mkdir(parents=True, exist_ok=True)
            text = source_text(captured, job.plan, self.layout, self.layout.build(captured))
            (job.run / f"stage{self.stage}.py").write_text(text, encoding="utf-8")
        if self.place.rank == 0:
            self._forget_other_stages()
        self.rng = MinibatchRng(job.config.seed, self.device)
        whole, rest = self._stage_module(captured), None
        if captures.rest is not None:
            rest = self._stage_module(captures.rest)
            rest.share(whole, captures.buffers)
        self.stage_modules = StageModules(whole, rest, self.examples.sizes.last)
        self.trial = captures.trial
        self.module = whole.piece.module
        self.parameters: dict[str, Parameter] = dict(self.module.named_parameters())
        buffers = self.module.named_buffers()
        self.buffers = {name: buffer for name, buffer in buffers if name in captures.persistent}
        self.optimizer = make_optimizer(job.optimizer, self.parameters, captures.parameters)
        self.loss = load_loss(job.config.loss, job.directory)

    def _stage_module(self, captured: Captured) -> StageModule:
        def compute(captured: Captured, piece: Segment) -> Compute:
            seed_each(piece, operator_positions(captured.module), self.rng)
            return make_compute(piece, self.job.config, self.device)

        layout = layouts(captured, self.job.plan)[self.stage]
        return StageModule.of(captured, layout, self.device, compute)

    def _forget_other_stages(self) -> None:
        """The text of stages that an earlier plan of this run had, and this one has not."""
        mine = {f"stage{stage}.py" for stage in range(len(self.layouts))}
        for path in self.job.run.glob("stage*.py"):
            if path.name not in mine:
                path.unlink()

    def _check_tied(self) -> None:
        if self.tied and not self.job.policy.same_everywhere:
            name, stages = next(iter(self.tied.items()))
            raise UserError(
                f"parameter {name} is used in stages {' and '.join(map(str, stages))}: with "
                f"{self.job.schedule} each stage would learn its own; use --schedule flush or 2bw, "
                "or untie the weights"
            )

    def make_stepping(self, add_up: Callable[[torch.Tensor], None]) -> Stepping:
        """The steps of its optimizer; `add_up` replaces a tensor by its sum over all ranks."""
        config, together = self.job.config, self.job.policy.same_everywhere
        # What replicas hold in common, and tied stages, counts once.
        first = {name: min(stages) == self.stage for name, stages in self.tied.items()}
        counted = [name for name in self.parameters if first.get(name, True)]
        return Stepping(
            self.optimizer,
            self.parameters,
            config,
            LearningRate(config.scheduler, self.optimizer, self.job.directory),
            LossSum(add_up, self.device),
            add_up if together else None,
            counted if self.replica == 0 or not together else (),
        )

    @cache  # noqa: B019 - lives as long as the process
    def actions(self, minibatches: int) -> Sequence[Action]:
        """What it does in so many minibatches; the others' passes are not kept."""
        return self.schedule(minibatches).actions(self.worker)

    def schedule(self, minibatches: int) -> Schedule:
        """Of that many minibatches, from an empty pipeline to an empty one."""
        return Schedule(self.job.spec(links(self.layouts), self.tied), minibatches)

    @property
    def every(self) -> int | None:
        """How many minibatches a segment has; None: the whole epoch."""
        every = self.job.save_every
        return None if every is None else whole_updates(every, self.job.policy)

    def tensors(self) -> Iterator[torch.Tensor]:
        """What it holds between epochs."""
        yield from self.module.parameters()
        yield from self.module.buffers()
        yield from state_tensors(self.optimizer, self.parameters).values()
