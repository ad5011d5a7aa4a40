"""Runs a script of docs/examples: `python run_example.py SCRIPT`."""

import runpy
import sys

from pipedream.capture.errors.user_code import import_torchvision

import_torchvision()  # where torch is a build without its operators, others fail to import it
sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
runpy.run_path(sys.argv[0], run_name="__main__")
