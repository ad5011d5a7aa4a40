"""How long nodes take in whole passes, as in training, and in stretches that run as stages do.

`full_pass` times both, not compiled and compiled; `division` divides nodes into stretches, and fits
the times of nodes to theirs; `timed_stretch` is one of them, and says what compiling it gains;
`group_trial` finds the groups of operators that are faster compiled.
"""
