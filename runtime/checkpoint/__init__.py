"""Checkpoints, keyed by parameter name: a run resumes under any plan, the plain model loads them.

`files` is their format on disk, `saver` writes them beside the training, `export` and `dcp` write
the result in formats of others. Where a run begins `pipedream.runtime.local.resume` reads them.
Begin with `files`.
"""
