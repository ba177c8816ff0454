"""What can be wrong with an upstream library and its overlay. Each message is one line with the next step."""

from __future__ import annotations

from xstage_plugin.errors import XStageError


class UpstreamError(XStageError):
    """Base of the errors about an upstream library. The stock library keeps working untouched after any of them."""


class NotInstalledError(UpstreamError):
    """No upstream library of a known kind is installed."""


class UnknownVersionError(UpstreamError):
    """An upstream library is installed in a version that no pin describes; the message lists the known ones."""


class TargetRefusedError(UpstreamError):
    """The version is known, and there is no shadow header for it (yet); the message says why."""


class UnrunTargetError(TargetRefusedError):
    """The overlay builds and its kernels compile, and nobody ever ran them; the message says why, and how to allow it."""


class MismatchError(UpstreamError):
    """A file of the upstream library is not the pinned one; the message names it."""


class HeaderError(UpstreamError):
    """A header of ours has a form that upstream's run-time compiler refuses, or is missing."""


class OverlayError(UpstreamError):
    """The overlay cannot be built, or the user's cache cannot be written."""


class AlreadyCompiledError(UpstreamError):
    """A kernel was compiled before the overlay was activated, or nobody can tell."""


class NotInEffectError(UpstreamError):
    """The overlay was activated and the run-time compiler does not read it."""
