"""`python -m warpfold.cli`: the command line without the installed script."""

from warpfold.cli import main

main()
