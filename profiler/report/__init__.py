"""What pd-profile prints and draws.

`layers` is a profile as a table, `summary` prints it and `layers_picture` draws it. `view`: --show
and --diff, with `diff`. `batch_sizes`: profiles at several batch sizes.
"""
