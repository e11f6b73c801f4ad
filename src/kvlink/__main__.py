"""`python -m kvlink`."""

from kvlink.cli import main

if __name__ == "__main__":
    main()
