"""`pd-profile --network`: messages and all-reduces between ranks, as a cluster file.

`command` is what each rank runs. `levels` chooses pairs and groups of ranks, `measure` times them
over `wire`, `interference` finds the compute time that they cost, `link_fit` fits latency and
bandwidth, and `report` writes the results.
"""
