"""How long the nodes of a model take.

`passes` and `stopwatch` time one pass, `stopping_rule` decides when to stop. `per_node` times nodes
one by one, if memory is short, or if the model itself does not fit. `backward_split` divides the
backward pass of a node, `operator_times` its seconds among its operators. `contention`,
`training_overheads` and `muon_steps` measure what else training costs.
"""
