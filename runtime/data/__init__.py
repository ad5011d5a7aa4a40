"""The minibatches of a run.

`examples` loads the dataset, `order` says which examples an epoch has in which order, and `reader`
reads them ahead of the passes. Begin with `reader`.
"""
