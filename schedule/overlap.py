"""What runs beside the passes of a rank, and how far: by these the engine acts and the simulator
times it.
"""

from __future__ import annotations

LOOK_AHEAD = 16
"""How many actions ahead the receives are posted. A message waits for its receive."""

FIRST_LOOK_AHEAD = 1
"""As `LOOK_AHEAD`, where communicators are queues, until each kind of pass has been done: what a
GPU does for the first one may wait for all that is under way, so for receives, too.
"""

BUCKET_BYTES = 4 * 2**20
"""A sum of more bytes is several sums of about so many, begun one by one in the last backward pass
of a round, each as soon as its gradients are there.
"""
