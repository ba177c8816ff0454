"""The course of a check over several processes: which checks run, what was found so far, and where one stands still.

What was found is in the file after every check, and a check that takes too long ends the process with the stacks of all
threads: a run that is ended from outside keeps its verdicts, and says where it was.
"""

import faulthandler
import json
import sys
import time


def chosen(names, only):
    """The entries of ``names`` that ``only`` asks for: all for None, one by its name, or a comma-separated list of beginnings.

    Raises:
        ValueError: a part of the list begins no name.
    """
    if only is None or only in names:
        return [name for name in names if only in (None, name)]
    parts = [part.strip() for part in only.split(",")]
    unknown = [part for part in parts if not part or not any(name.startswith(part) for name in names)]
    if unknown:
        raise ValueError(f"nothing begins with {unknown[0]!r}; known: {'; '.join(names)}")
    return [name for name in names if name.startswith(tuple(parts))]


def verdict(found):
    """One word for what a check found; more where something is wrong. Texts are for others to judge."""
    if isinstance(found, dict):
        wrong = [name for name, good in found.items() if good is False]
        return f"WRONG: {'; '.join(wrong)}" if wrong else "refused" if "refused" in found else "ok"
    return f"WRONG: {found}" if found else "ok"


class Run:
    """What this rank has found. ``summary`` is kept in ``out`` (None: nowhere); a check may take ``limit_s`` seconds."""

    def __init__(self, summary, rank, out, limit_s):
        self.summary, self._rank, self._limit_s = summary, rank, limit_s
        self._out = out and out.with_suffix(f".{rank}.json")

    def check(self, kernel, name, find):
        """Run ``find`` and keep what it gives as what ``kernel`` did in the check ``name``."""
        title, start = f"{kernel}: {name}", time.monotonic()
        self.summary["running"] = title
        self._write()
        if self._rank == 0:
            self._say(title)
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=sys.__stderr__)
        # Not taken back after an error: with the GPU standing still the interpreter may not get to its end either.
        found = find()
        faulthandler.cancel_dump_traceback_later()
        seconds = self.summary["seconds"][title] = round(time.monotonic() - start, 1)
        self.summary["kernels"].setdefault(kernel, {})[name] = found
        del self.summary["running"]
        self._write()
        text = verdict(found)
        if self._rank == 0 or text.startswith("WRONG"):
            self._say(f"{title}: {text} ({seconds} s)")

    def end(self, **more):
        """Keep ``more`` as well, and print everything."""
        self.summary.update(more)
        self._write()
        print(json.dumps(self.summary), flush=True)

    def _say(self, text):
        print(f"rank {self._rank}: {text}", file=sys.stderr, flush=True)

    def _write(self):
        if self._out:
            self._out.write_text(json.dumps(self.summary))
