"""Checkpoints, keyed by parameter name: a run resumes under any plan, the plain model loads them.

`files` is their format on disk, `saver` writes them beside the training, `savepoint` and `resume`
are the two ends of a run; `plain_model` and `export` hand the result on. `lock` keeps a second run
out of the folder. Begin with `files`.
"""
