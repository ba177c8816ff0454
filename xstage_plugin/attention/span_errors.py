"""What can be wrong with a span or an attention call over ranks. Each message is one line with the next step."""

from __future__ import annotations

from xstage_plugin.errors import XStageError


class GroupMismatchError(XStageError):
    """The ranks of a group gave what does not fit together, or one of them could not go on; raised on all of them alike."""


class SpanRefusedError(GroupMismatchError):
    """These ranks cannot have a span over each other's memory; raised on all of them alike, with the reason."""


class SpanClosedError(XStageError):
    """A span was used after ``close()``; its memory is no longer mapped."""
