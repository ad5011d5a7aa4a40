"""What a stage costs, in seconds and bytes.

- `stage_cost.py`: the question that searches ask, and the price over all levels; begin here
- `models.py`: the cost models; add new ones there
- `memory.py`, `worker_memory.py`: the memory of a worker, and of those of a plan
- `device_types.py`, `network.py`: devices and links
- `stages.py`: stages on devices, as searches find them; `stage_time.py`: from them to ranks
"""
