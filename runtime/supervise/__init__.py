"""Starting, watching and stopping the ranks of a run.

`launch` forks them off on this machine and restarts them, with `heartbeat` to see that they live;
under torchrun and mpirun `watchdog` does that. `graceful_stop` drains and saves at Ctrl-C, `replan`
goes on with fewer workers, `retune` under a better plan, `status` tells rank 0 what each rank is
doing. Begin with `launch`.
"""
