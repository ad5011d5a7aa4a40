"""The corrections for late gradients whose memory is counted."""

from __future__ import annotations

from pipedream.graph.choices import (
    CORRECTED,
    WHOLE_STATE,
    Correction,
    ScheduleName,
    not_together,
)
from pipedream.graph.errors import UserError
from pipedream.graph.profile import Profile
from pipedream.optimizer.cli.options import Options


def corrections_of(
    options: Options, schedule: ScheduleName, profile: Profile | None
) -> frozenset[Correction]:
    """Returns those that are asked for. Raises UserError for what pd-train would refuse, and where
    nothing is known of bases.
    """
    wanted = options.corrections
    for name in sorted(wanted):
        fit = CORRECTED[name]
        if schedule not in fit:
            raise UserError(
                f"{option_of(name)} is for {', '.join(fit)}, and the schedule is {schedule}: leave"
                " one of them out"
            )
    apart = not_together(wanted)
    if apart is not None:
        both = " and ".join(map(option_of, apart))
        raise UserError(f"{both} are not to be had together: leave one of them out")
    if "basis_rotation" in wanted:
        _check_rotation(options, profile)
    return wanted


def _check_rotation(options: Options, profile: Profile | None) -> None:
    why = None
    if options.optimizer != "adam":
        why = f"it is a form of Adam, and the optimizer is {options.optimizer}: leave --optimizer"
    elif options.mesh is not None:
        why = "bases are of whole matrices, which --mesh divides: leave --mesh"
    if why is not None:
        raise UserError(f"--basis-rotation: {why} or --basis-rotation out")
    if profile is None or not profile.knows_bases:
        raise UserError(
            f"--basis-rotation: {options.profile_path} does not say what bases take: run"
            " pd-profile again"
        )


def whole_state_option(options: Options) -> str | None:
    """Returns an option with which replicas cannot divide the optimizer's state, if any."""
    return next((option_of(name) for name in WHOLE_STATE if name in options.corrections), None)


def option_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
