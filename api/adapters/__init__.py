"""The `Pipeline` of pipedream.runtime.pipeline for the trainers of other libraries.

`transformers` has a Trainer, `lightning` a strategy. A loop with Accelerate needs none: see
docs/how-to/own-loop.md.
"""
