"""Writes a plan for other frameworks (`--export`).

- `frameworks.py`: one function per framework; begin here, and add new ones there
- `module_split.py`: rounds a plan to whole modules
- `degrees.py`: what the devices of meshes are to them; `dtensor.py`: placements of parameters
- `torch_order.py`: the order of passes as torch reads it
"""
