"""Checkpoints, keyed by parameter name: a run resumes under any plan, the plain model loads them.

`files` is their format on disk, `saver` writes them beside the training, `resume` reads them, and
`plain_model` evaluates and exports the result. Begin with `files`.
"""
