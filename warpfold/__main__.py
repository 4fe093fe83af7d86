"""`python -m warpfold` is `warpfold`."""

from warpfold.cli import main

main()
