"""``python -m teamtr.cli``."""

from teamtr.cli import main

main()
