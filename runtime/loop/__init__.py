"""What a `Pipeline` needs for a loop of the user's own, beside the engine.

Begin with `pipedream.runtime.pipeline`. `staged_model` is the model as it is at one time, known by
its `model_state`; `agreement` of the ranks; `outputs` and `whole_state` bring together what ranks
have of predictions and of an optimizer's state.
"""
