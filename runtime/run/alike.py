"""Whether the workers of a run compute alike, to the last bit.

Muon and rotated bases magnify rounding errors: an orthogonal matrix, or the eigenvectors of close
eigenvalues, may differ by much where what they are made of differs by little. Replicas, and stages
that share a parameter, each compute their own, and would part.
"""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import Store

from pipedream.comm.device.names import device_name
from pipedream.comm.rank_info import RankInfo
from pipedream.comm.store_messages import broadcast
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import MUON
from pipedream.runtime.optim.late_gradients import ROTATED
from pipedream.runtime.run.job import Job

_MAGNIFYING = (MUON, ROTATED)


def check_alike(
    job: Job, is_shared: bool, store: Store, rank_info: RankInfo, device: torch.device
) -> None:
    """Raises UserError on a rank whose device or number of threads is not rank 0's, where that
    matters. Called by all ranks. `is_shared`: whether stages have parameters in common.
    """
    optimizer = job.optimizer.names
    magnifies = any(name in optimizer for name in _MAGNIFYING)
    if not magnifies or not (is_shared or max(job.plan.replicas) > 1):
        return
    own = f"{device_name(device)} with {torch.get_num_threads()} threads"
    first = broadcast(store, rank_info, "alike", own)
    if own != first:
        raise UserError(
            f"optimizer {job.optimizer_names}: replicas and stages that share parameters have to"
            f" compute alike to the last bit, and rank {rank_info.rank} is on {own}, rank 0 on"
            f" {first}: set OMP_NUM_THREADS to the same on all workers, or choose AdamW"
        )
