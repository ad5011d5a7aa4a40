"""What a `Pipeline` needs for a loop of the user's own, beside the engine.

Begin with `pipedream.runtime.pipeline`. `staged_model` is the model as it is at one time, known by
its `model_state`; `split_minibatch` has microbatches and their parts of a mean; `evaluation` is a
minibatch without gradients; `agreement` is that of the ranks, and of a rank with its loop;
`gathering` brings together what ranks have of the model and its optimizer.
"""
