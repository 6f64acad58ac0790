"""`python -m moeless`."""

from moeless.cli import main

main()
