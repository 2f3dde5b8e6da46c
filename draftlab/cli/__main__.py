"""`python -m draftlab.cli`, which equals the `draftlab` command."""

from draftlab.cli import main

main()
