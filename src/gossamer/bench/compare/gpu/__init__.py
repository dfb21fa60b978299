"""Checks of `gossamer doctor --gpu`: each is a module here, and runs in separate processes, which it may end.

`examine` runs all checks, `launch` starts the ranks, `rank` is the program of a rank, `report` formats the findings.
"""
