"""From the captured model to the stages of a plan.

`partition` finds what each stage computes and which tensors pass between stages; `stage_module`
runs one, with the seeds of `randomness`, and `stage_program` where backward passes are in halves or
the stage is on a mesh: `divide` makes a `sharded_stage` of it, as its `planned_passes` say.
`stage_forms` has the module for each minibatch, and captures those for further shapes; in a loop of
the user's own a `divided_stage` has parts of whole parameters. `dtensor_placements` reads
placements that were exported for torch. Begin with `partition`.
"""
