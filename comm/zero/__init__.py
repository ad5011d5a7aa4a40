"""ZeRO-1: replicas of a stage each update a part of its parameters, and keep the optimizer's state
of that part alone (Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", SC 2020, section 5.1).

`rows` says which part of a tensor is whose, and lays tensors out for an exchange; `exchange` has
the two: a reduce-scatter of gradients, of which `bucket` is a bucket, and an all-gather of the
parameters, `gather`. Begin with `rows`.
"""
