"""report.html: a run on one page that needs no other file.

`run_page` writes it from a `finished_run` and the template report.html. `tables`, `loss_chart` and
`pictures` make what stands on it. Begin with `run_page`.
"""
