"""Scripts that measure eyas, run from the root of the repository as `python -m benchmarks.NAME`; index: README.md."""
