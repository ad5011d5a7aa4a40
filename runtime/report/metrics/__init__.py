"""What a run measures, given to TensorBoard, W&B, MLflow or the user's own: `writer` is their base.

`writers` has the first three, makes those that a run config names, and keeps their mistakes from
the run. Begin with `writer`.
"""
