"""Profiles of devices that are not at hand: what operators take, from their flops and bytes.

`work`: what an operator has to do. `device_file`: what a device does in a second, read from a file
of `devices/`. `roofline`: seconds from the two. `node_times`, `footprints`: those of the nodes of
a model. `estimate`: the whole profile. `fit`: a device file from measured profiles.
"""
