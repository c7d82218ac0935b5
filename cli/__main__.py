"""`python3 -m cli` in a checkout, where nothing is installed."""

from .main import main

main()
