"""Where the elements of a tensor are when several devices hold it, and the operators of a stage.

`placement`: replicated, sharded or partial on each axis of a device mesh, as text too. `regions`:
what a device then holds. `operators`: the operators of a stage as plain data, operators.json;
`operator_class`: what an element of their output needs.
`requests`: the placements that a user sets. Begin with `placement`.
"""
