"""The modules, one file for each kind."""
