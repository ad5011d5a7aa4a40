"""Whether what is captured is what the model does.

`determinism_check`: does the model compute the same for every minibatch? `autograd_check`: does the
graph keep the backward pass of every autograd function? `equivalence`: do both give the same
outputs, gradients and buffers on a real minibatch? Begin with equivalence.
"""
