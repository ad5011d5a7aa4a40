"""A rank before it meets the others: its part of the model.

`captures` captures the model in each way in which it will run; `local_model` keeps the stages of
this rank, each a `local_stage`, if they can learn in the order of the plan;
`resume` gives them the weights with which the run begins. Begin with `local_model`.
"""
