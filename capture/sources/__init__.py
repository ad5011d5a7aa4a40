"""Models and data by name: torchvision, timm, transformers, Hugging Face datasets, own code.

`load` reads MODEL arguments and run configs and calls one of the other modules. `minibatch`
collates examples.
"""
