"""Command: what is wrong with this machine and how to cure it; whether a run fits a GPU."""
