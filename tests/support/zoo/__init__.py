"""A hundred small modules that training must get right, or refuse in one line.

`specimens` has what a module of the zoo is, `kinds` the modules, `plain` what they learn in a loop
as anybody would write it, `piped` what they learn as pipelines, `verdict` whether that is the same.
"""
