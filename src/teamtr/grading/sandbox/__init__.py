"""Untrusted code, run where it can do no harm.

``client`` is the side of the training process. The other modules are never imported by it, only started: ``server``
takes jobs and forks a process for each; ``isolation`` and ``syscalls`` restrict that process; ``program`` runs the
untrusted code in it, and is the only file of the library that executes text.
"""
