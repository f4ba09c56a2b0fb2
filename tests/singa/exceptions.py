"""The cases of SINGA's unit tests that fail on distopt: file, reason, cases."""

EXCEPTIONS: dict[str, dict[str, str]] = {}
