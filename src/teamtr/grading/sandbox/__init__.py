"""Runs untrusted code in isolated processes.

``client`` runs in the training process. It never imports the other modules, but starts them: ``server`` takes jobs and
forks a process for each; ``isolation`` and ``syscalls`` restrict that process; ``program`` runs the untrusted code in
it, and is the only file of the library that executes text.
"""
