"""Before a run trains, its first round is compared with the model itself.

`reference`: what the captured model gives in one process. `rehearsal`: the same round through the
pipeline, as the run will do it; `first_call`: for `Pipeline`. `fingerprint`: a few numbers for each
tensor, to compare by. That the captured model is the user's is checked in pipedream.capture.checks.
Begin with rehearsal.
"""
