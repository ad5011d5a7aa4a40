"""The passes of one minibatch through a stage that trains, by autograd or as programs.

Begin with passes.py, what the two have in common; autograd_passes.py and program_passes.py are the
two, round_gradients.py is where they add the gradients of parameters.
"""
