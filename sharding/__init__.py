"""How the operators of a stage are divided among the devices of a mesh. No torch.

`rules`: how each operator can be divided. `propagate`: from placements that a user sets to a
division of all operators (`assignment`), one axis of the mesh after the other (`axis`).
`local_times`: what a device takes of an operator. `redistribution`: from one placement to another
on one mesh, in `steps`. `tiles`: from one mesh to another. What files hold (operators, placements)
is in `pipedream.graph.placements`. Begin with `rules/strategy`, then `propagate`.
"""
