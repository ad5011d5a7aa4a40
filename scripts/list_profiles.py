"""profiles/README.md from the profiles that are there: `python scripts/list_profiles.py`"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipedream.graph.profile import Profile, Quartiles, read_profile

PROFILES = Path(__file__).parents[1] / "profiles"
TEXT = """# Profiles of well-known models

Eight models with random weights, measured by `scripts/make_profiles.sh`. Each folder has the
graph.txt and profile.json of one model. To see a profile, and to plan with it:

    pd-profile --show profiles/resnet50
    pd-optimize profiles/resnet50/graph.txt --machines 4 --bandwidth 10GB -o runs/plan

Times belong to the device that was measured; sizes are the same on any device.

{table}

*Half the passes*: the quartiles of the time of a pass, relative to its median. *Off*: by how much
stretches of the model, timed as a whole, differ from the sums of their nodes, forward and backward,
in the median.

Measured on {devices}.
"""
HEADINGS = (
    "profile", "model", "batch", "nodes", "forward", "backward", "half the passes", "off",
    "parameters", "saved",
)  # fmt: skip


def main() -> None:
    found = {path.parent.name: read_profile(path) for path in PROFILES.glob("*/profile.json")}
    rows = [HEADINGS, ("---",) * len(HEADINGS), *(row(n, found[n]) for n in sorted(found))]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    text = TEXT.format(table=table, devices=devices(found.values()))
    (PROFILES / "README.md").write_text(text)


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
    spread = Quartiles.of(profile.pass_seconds)
    return f"{spread.lower / spread.median - 1:+.1%}, {spread.upper / spread.median - 1:+.1%}"


def errors(profile: Profile) -> str:
    if profile.forward is None or profile.backward is None:
        return "-"
    return f"{profile.forward.typical_error:.1%}, {profile.backward.typical_error:.1%}"


def devices(profiles: Iterable[Profile]) -> str:
    """Of each device what ran on it, with all libraries that had a part in any of its profiles."""
    found: dict[str, dict[str, str]] = {}
    for machine in (profile.machine for profile in profiles):
        threads = f", {machine.threads} thread{'s' * (machine.threads > 1)}"
        name = machine.device_name + (threads if machine.device == "cpu" else "")
        ran = {"torch": machine.torch, "Python": machine.python, **machine.libraries}
        found.setdefault(name, {}).update(ran)
    return "; ".join(
        f"{name} ({', '.join(f'{what} {version}' for what, version in ran.items())})"
        for name, ran in sorted(found.items())
    )


if __name__ == "__main__":
    main()
