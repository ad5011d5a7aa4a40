"""Reads many broken files of every kind that the tools read, and says which are not refused well.

    python scripts/fuzz.py [--count 10000] [--first 0] [READER ...]

Each is a valid file that is changed in one to three places, by a seed. Well: it is read, or refused
in one short line within five seconds, and no file is changed or written.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import click

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support" / "broken"))
from mutated_files import READERS, mutated, read_mutated
from whole_files import whole_file


@click.command(help=__doc__)
@click.argument("readers", nargs=-1)
@click.option("--count", default=10_000, show_default=True, help="Files for each reader.")
@click.option("--first", default=0, help="Seed of the first.")
def main(readers: tuple[str, ...], count: int, first: int) -> None:
    failures = 0
    for name in readers or READERS:
        refused = bad = 0
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(first, first + count):
                changed = mutated(whole_file(name), random.Random(seed))
                try:
                    refused += read_mutated(READERS[name], changed, Path(folder)) is not None
                except Exception as error:
                    bad += 1
                    words = " ".join(f"{error}".split())[:150]
                    print(f"{name} seed {seed}: {type(error).__name__}: {words}", flush=True)
        print(f"{name}: {count} files, {refused} refused, {bad} not well", flush=True)
        failures += bad
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
