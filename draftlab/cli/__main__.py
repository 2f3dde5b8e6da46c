"""`python -m draftlab.cli`, which equals the `draftlab` command; workers are started so."""

from draftlab.cli import main
from draftlab.signals import end_with_parent

end_with_parent()
main()
