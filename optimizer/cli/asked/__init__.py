"""What the options of planning ask for, each kind checked and turned into what a request holds.

`model`: the graph, its profile and runs; `operators`: whether they are divided; `stages`: those
that the user gives, and groups; `updates`: the schedule, and the examples of an update; `memory`:
what a device has for the model; `files`: where results go.
"""
