"""profiles/README.md from the profiles that are there: `python scripts/list_profiles.py`"""

from __future__ import annotations

from pathlib import Path

from pipedream.profiler.profile import Profile, read_profile
from pipedream.profiler.timing import Spread

PROFILES = Path(__file__).parents[1] / "profiles"
TEXT = """# Profiles of well-known models

Measured by `scripts/make_profiles.sh` with random weights. Each folder has graph.txt and
profile.json, which says the rest: `pd-profile --show profiles/resnet50`,
`pd-optimize profiles/resnet50/graph.txt --machines 4 --bandwidth 10GB -o runs/plan`. Times are
those of the device; sizes are those of any.

{table}

*Half the passes*: the quartiles of the time of a pass beside its median. *Off*: by how much
stretches of the model, timed as a whole, differ from the sums of their nodes, forward and backward,
in the median.

Devices: {devices}.
"""
HEADINGS = (
    "profile", "model", "batch", "nodes", "forward", "backward", "half the passes", "off",
    "parameters", "saved",
)  # fmt: skip


def main() -> None:
    found = {path.parent.name: read_profile(path) for path in PROFILES.glob("*/profile.json")}
    rows = [HEADINGS, ("---",) * len(HEADINGS), *(row(n, found[n]) for n in sorted(found))]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    devices = "; ".join(sorted({device(profile) for profile in found.values()}))
    (PROFILES / "README.md").write_text(TEXT.format(table=table, devices=devices))


def row(name: str, profile: Profile) -> tuple[str, ...]:
    arguments = " ".join(f"{key}={value}" for key, value in profile.args.items())
    saved = sum(node.saved_bytes or 0 for node in profile.nodes)
    return (
        name,
        f"`{profile.model}` {arguments}".rstrip(),
        str(profile.batch_size),
        str(len(profile.nodes)),
        f"{profile.totals.forward_seconds:.3f} s",
        f"{profile.totals.backward_seconds:.3f} s",
        quartiles(profile),
        errors(profile),
        f"{profile.totals.parameter_bytes / 1e6:.0f} MB",
        f"{saved / 1e6:.0f} MB",
    )


def quartiles(profile: Profile) -> str:
    if len(profile.pass_seconds) < 2:
        return "-"
    spread = Spread.of(profile.pass_seconds)
    return f"{spread.lower / spread.median - 1:+.1%}, {spread.upper / spread.median - 1:+.1%}"


def errors(profile: Profile) -> str:
    if profile.forward is None or profile.backward is None:
        return "-"
    return f"{profile.forward.typical_error:.1%}, {profile.backward.typical_error:.1%}"


def device(profile: Profile) -> str:
    machine = profile.machine
    threads = f", {machine.threads} thread" + "s" * (machine.threads > 1)
    libraries = ", ".join(f"{name} {version}" for name, version in machine.libraries.items())
    return (
        f"{machine.device_name}{threads if machine.device == 'cpu' else ''}, torch {machine.torch},"
        f" Python {machine.python}{', ' + libraries if libraries else ''}"
    )


if __name__ == "__main__":
    main()
