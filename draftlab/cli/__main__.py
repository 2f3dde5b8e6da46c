"""`python -m draftlab.cli`, which equals `python -m draftlab`."""

from draftlab.cli import main

main()
