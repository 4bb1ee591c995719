"""``python -m dspark_fast`` is ``dspark-fast``."""

from dspark_fast.cli import main

if __name__ == "__main__":
    main()
