"""Building, testing and checking what a release uploads; `make wheels`, `make wheels-test`, `make release`."""
