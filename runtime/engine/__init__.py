"""What a rank does while it trains or evaluates.

`engine` is the loop over its list of actions; `executor` performs those of a stage; `forward` is
shared by training and `evaluation`; `minibatch_state` and `passes` are what a minibatch leaves
between its passes; `wiring` joins ranks, and `value_exchange` is what their messages hold. Begin
with `engine`.
"""
