"""Writes a plan for other frameworks (`--export`).

- `frameworks.py`: one function per framework; begin here, and add new ones there
- `module_split.py`: rounds a plan to whole modules
- `torch_order.py`: the order of passes as torch reads it
"""
