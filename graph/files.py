"""Reading a text file that the user named."""

from __future__ import annotations

from pathlib import Path

from pipedream.graph.command import UserError


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises UserError `FILE: cannot be read: why`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read: not a text file in UTF-8") from error
