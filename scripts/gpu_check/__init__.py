"""What only a machine with a GPU can tell, in under ten minutes: `scripts/gpu_check.sh`.

`checks` lists what is checked, in the order of how much it tells. Each is a function in `measures`,
called by `child` in a process of its own, which `processes` ends with all its children when its
time is up. `report` shows what they found.
"""
