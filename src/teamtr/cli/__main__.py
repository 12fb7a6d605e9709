"""Entry point of ``python -m teamtr.cli``."""

from teamtr.cli import main

if __name__ == "__main__":
    main()
