"""Orders of passes within a round that ends with a flush, for ranks with one stage or several.

`passes.py` says what such a round is, `timing.py` how long it takes, `named.py` which there are.
Those of the literature (`literature.py`) are in `interleaved.py`, `zero_bubble.py` and
`v_shaped.py`; `auto.py` finds one for measured times. `deferred.py` puts gradients of weights where
a rank would wait.
"""
