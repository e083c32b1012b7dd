"""Which failures have one cause: a fingerprint of the task, the type of the error, and the place. No I/O.

The place is a function, without a line number: another version of the code keeps its groups. It is found where the
failure is described (`outcomes`), from the traceback. Nothing here raises, whatever the exception is.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path
from types import FrameType

from pgqueue.plain_text import asked

PLACE_MOST, FRAMES_MOST = 200, 2_000

OURS = f"{Path(__file__).parents[1]}{os.sep}"
STANDARD = f"{Path(os.__file__).parent}{os.sep}"
"""Where pgqueue lies, and where the standard library."""
INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages."""


def fingerprint(task: str, error_type: str, place: str | None) -> str:
    """Sixteen hexadecimal digits, the same in every process and version.

    >>> fingerprint("shop.charge", "ValueError", "shop.cards.check")
    'c4ee4f8ac260916e'
    """
    named = "\0".join((task, error_type, place or ""))
    return blake2b(named.encode("utf-8", "replace"), digest_size=8).hexdigest()


def place_of(error: BaseException) -> str | None:
    """The application's innermost frame in the traceback, as `module.function`; None if the traceback names none.

    A frame of pgqueue, of the standard library or of an installed package is not the application's, with one exception.
    The first frame below pgqueue's is of the handler, or of what wraps it: its package is the application's, wherever
    it is installed. If there is no frame of the application, the answer is the innermost frame that is not pgqueue's.
    """
    return asked(lambda: _place(error), lambda _: None)  # a class of the application's may answer anything


def _place(error: BaseException) -> str | None:
    package: str | None = None
    own: FrameType | None = None
    innermost: FrameType | None = None
    step, left = error.__traceback__, FRAMES_MOST
    while step is not None and left:
        frame, step, left = step.tb_frame, step.tb_next, left - 1
        path = frame.f_code.co_filename
        if path.startswith(OURS):
            continue
        innermost = frame
        if _is_standard(path):
            continue
        mine = _module(frame).partition(".")[0]
        package = package or mine
        if mine == package or not any(folder in path for folder in INSTALLED):
            own = frame
    found = own or innermost
    return None if found is None else f"{_module(found)}.{found.f_code.co_qualname}"[:PLACE_MOST]


def _is_standard(path: str) -> bool:
    return path.startswith("<frozen ") or (
        path.startswith(STANDARD) and not any(folder in path for folder in INSTALLED)
    )


def _module(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else "?"
