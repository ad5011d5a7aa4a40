"""What is changed in a graph that torch.export gives, before it is divided.

`recording.py` looks after what torch.export records, `unlift.py` makes attributes of parameters.
`no_grad.py` puts regions without gradient among the other operators. `functionalize.py` makes new
values of what is written in place, with `views.py`. `writes.py` says what operators write into, and
what shares memory. `constant_masks.py` tells attention what a mask says that is always the same.
"""
