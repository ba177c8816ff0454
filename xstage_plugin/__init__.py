"""X-Stage: how far a GPU kernel runs ahead of its own remote stores, and how to schedule by it.

Importing this package does nothing but define names: no directory, no build, no CUDA context.
"""

__version__ = "0.1.0"
