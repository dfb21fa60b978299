"""What `gossamer doctor --gpu` tries: each check is a module here, and runs in processes that may die of it.

`examine` says what is tried in which order, `launch` starts the ranks, `rank` is what they run, `report` is what is left.
"""
