"""What a rank does while it trains or evaluates.

`engine` is the loop over its list of actions; `executor` performs those of a stage, on the versions
in `weights`; `forward` is shared by training and `evaluation`; `minibatch_state` and `passes` are
what a minibatch leaves between its passes. `training_segment` and `action_stream` say what is to be
done between two checkpoints. Begin with `engine`.
"""
