"""`pd-profile --network`: messages and all-reduces between ranks, as a cluster file.

`command` is what each rank runs. `levels` chooses pairs and groups of ranks, `measure` times them
over `wire` and fits latency and bandwidth, `interference` finds the compute time that they cost,
and `report` writes the results.
"""
