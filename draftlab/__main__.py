"""`python -m draftlab`, which equals the `draftlab` command; workers are started so."""

from draftlab.cli import main

main()
