"""pd-profile: measures the time and memory of each layer of a model, and the network.

`cli` is the command, `measure` the path from a loaded model to its profile. `timing/` measures
times, `operators` those of single operators, `memory` the bytes saved for backward passes,
`network/` messages and all-reduces between ranks; `estimate/` has profiles of devices that are not
at hand. `assembly` puts a profile together; `report/` prints, draws and compares profiles. Begin
with `measure`.
"""
