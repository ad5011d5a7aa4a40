"""What a `Pipeline` needs for a loop of the user's own, beside the engine.

Begin with `pipedream.runtime.pipeline`. `staged_model` is the model as it is at one time, known by
its `model_state`; `split_minibatch` and `weighted_loss` are microbatches and their parts of a mean;
`agreement` of the ranks, `precision_check` of a rank with its loop; `outputs` and `whole_state`
bring together what ranks have of predictions and of an optimizer's state.
"""
