"""The order of passes in a pipeline. Pure: no torch, no processes.

`spec` describes a pipeline, `policy` what each schedule learns; `schedule` has the orders in which
a rank does its passes, with `generate` for 1F1B, and writes them down as lists of `action`s. The
engine performs these lists, the simulator times them, and `checker` proves that they cannot
deadlock; `operations`: what ranks begin together, in which order. `in_flight`: how many minibatches
keep a pipeline busy; `channel`: which way an action's message goes; `steady_state`: when a pipeline
is full, and its bubble. Begin with `schedule`.
"""
