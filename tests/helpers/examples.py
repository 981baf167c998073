"""How many examples hypothesis looks at."""

from hypothesis import settings


def examples(count: int) -> settings:
    """Let hypothesis look at `count` examples, or at as many percent of them as the profile says (`conftest.py`)."""
    return settings(max_examples=-(-count * settings().max_examples // 100))
