"""The order of passes in a pipeline. Pure: no torch, no processes.

`spec` describes a pipeline, `policy` what each schedule learns, `orders` in which order a rank does
its passes, with `generate` for 1F1B; `schedule` writes that down as lists of `action`s. The engine
performs these lists, the simulator times them, `checker` proves that they cannot deadlock and
`chart` draws them. Begin with `schedule`.
"""
