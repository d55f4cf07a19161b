"""`python -m outrider.cli`: the same as `outrider`."""

from outrider.cli.app import main

if __name__ == "__main__":
    main()
