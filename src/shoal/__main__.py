"""`python -m shoal`."""

from shoal.cli.main import main

main()
