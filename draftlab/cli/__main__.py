"""`python -m draftlab.cli`: what the `draftlab` command does."""

from draftlab.cli import main

main()
