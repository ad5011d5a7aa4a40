"""Plans whose stages run on meshes of devices (`pd-optimize --mesh`).

`model_sharding` divides the operators as the user says; `team_graph` makes the model as one
device of a team sees it, which the planner then divides among teams as among devices, and writes
the teams into the plan; `table` prints what is divided and what that moves.
"""
