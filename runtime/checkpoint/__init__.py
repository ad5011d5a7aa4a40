"""Checkpoints, keyed by parameter name: a run resumes under any plan, the plain model loads them.

`files` is their format on disk, `saver` writes them beside the training, `plain_model` evaluates
the result, `export` and `dcp` write it in formats of others. Where a run begins
`pipedream.runtime.local.resume` reads them. Begin with `files`.
"""
