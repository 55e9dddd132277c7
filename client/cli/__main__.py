"""`python -m memshare.client.cli` is `memshare`."""

from memshare.client.cli import main

if __name__ == "__main__":
    main()
