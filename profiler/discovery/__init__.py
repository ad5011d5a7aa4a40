"""How operators that no rule knows can be divided, found by running them.

`search`: all ways of one operator. `sizes`: the same operator with small tensors. `separate`: in a
process of its own, which an operator may end. `known`: what was found before, on disk.
"""
