"""Whether the files can be written where they are to go."""

from __future__ import annotations

import os
from pathlib import Path

from pipedream.graph.errors import UserError
from pipedream.optimizer.cli.inputs import has_profile
from pipedream.optimizer.cli.options import Options


def check_files(options: Options) -> None:
    """Raises UserError for a folder that cannot be written, or --export without a profile."""
    if options.output is not None:
        _check_folder(options, options.output)
    if options.export and not has_profile(options):
        raise UserError(
            f"--export {options.export[0]} needs {options.profile_path}: pd-profile writes it with"
            " graph.txt"
        )


def _check_folder(options: Options, folder: Path) -> None:
    graph = options.graph_path
    if options.calibrate and folder.resolve() == graph.resolve().parent:
        raise UserError(
            f"-o {folder}: {graph} would be overwritten by the graph with corrected times: name"
            " another folder"
        )
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"-o {folder}: cannot be written: {there} is a file; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"-o {folder}: cannot be written: no permission to write in {there}")
