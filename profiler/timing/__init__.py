"""How long the nodes of a model take.

`full_pass`: in whole passes, as in training. `per_node`: one by one, if memory is short,
or if the model itself does not fit. `passes` and `stopwatch` time one
pass, `stopping_rule` decides when to stop, `stretches` compares nodes with stretches of them.
`backward_split` divides the backward pass of a node, `operator_times` its seconds among
its operators. `contention` and `training_overheads` measure what else training costs.
"""
