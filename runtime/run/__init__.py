"""A run before any process takes part in it. Pure: no torch.

`job` is what pd-train was asked to do; `training_segment` divides it at the positions where it can
be saved, and `action_stream` is what a rank does in a segment. Begin with `job`.
"""
