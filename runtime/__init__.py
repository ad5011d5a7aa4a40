"""Plan in, trained model out: `pd-train`.

`run` is what was asked for, `stages` turns the captured model into modules, `engine` performs a
rank's actions, `optim` makes the updates, `data` reads minibatches, `checkpoint` saves, `supervise`
starts and watches the ranks, `report` writes what happened. Begin reading with `trainer`, one
rank's whole run; then `local` and `rank_context`, what a rank has, and `epochs`, its loop.
"""
