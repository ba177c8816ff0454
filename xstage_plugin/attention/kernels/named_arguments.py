# mypy: ignore-errors
"""Arguments of an upstream method by name, so that what we put in its place depends on names and not on their order."""

import inspect


def named(method, kernel, args, kwargs=None):
    """``{name: value}`` for a call of ``method`` on ``kernel``, defaults included, without ``self``."""
    bound = inspect.signature(method).bind(kernel, *args, **kwargs or {})
    bound.apply_defaults()
    del bound.arguments["self"]
    return dict(bound.arguments)
