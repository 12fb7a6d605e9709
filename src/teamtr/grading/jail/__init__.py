"""What runs on the far side of ``grading/sandbox.py``: never imported by the training process, only started.

``server`` takes jobs and forks a process for each; ``walls`` and ``calls`` shut that process in; ``program`` runs the
untrusted code in it, and is the only file of the library that executes text.
"""
