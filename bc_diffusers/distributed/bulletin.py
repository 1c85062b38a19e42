"""What the processes of a launch tell one another outside of collectives: how far they are, and that one has failed.

A collective needs all ranks, and fails or hangs on all when one is gone. So news goes through the launch's key-value
store, which any rank can read at any time.
"""

import datetime
import os
import sys
import threading
import time
import traceback
from contextlib import contextmanager

import torch.distributed as dist


POLL_SECONDS = 0.5
# How long a rank that suffers from another one's failure waits for the launcher to end it, before it speaks itself.
GRACE_SECONDS = 10.0
_USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError)


class Bulletin:
    """Shared counters and the news of a failure. In a single process it only counts.

    Args:
        rank (`int`): of this process in the launch.
    """

    def __init__(self, rank: int):
        self.rank, self._counts, self._store = rank, {}, None
        if dist.is_available() and dist.is_initialized():
            # A connection of our own: a collective that waits for a rank that is gone holds the group's.
            store = dist.PrefixStore("block_causal", dist.distributed_c10d._get_default_store().clone())
            store.set_timeout(datetime.timedelta(seconds=30))
            self._store = store

    def add(self, name: str, n: int = 1) -> int:
        """Adds to the launch's counter `name`; returns the new count."""
        if self._store is None:
            self._counts[name] = self._counts.get(name, 0) + n
            return self._counts[name]
        return self._store.add(name, n)

    def wait_for(self, name: str, count: int) -> None:
        """Waits, for hours if need be, until the counter has reached `count`."""
        while self.add(name, 0) < count:
            time.sleep(POLL_SECONDS)

    @contextmanager
    def failing_together(self):
        """An exception inside ends the whole launch, with one message.

        The first rank to fail says why; the others, which fail because it is gone or for the same reason, leave
        quietly, whatever they are doing. All ranks reach the end of the block together. In a single process the
        exception just goes on.
        """
        if self._store is None:
            yield
            return
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(done,), daemon=True)
        watch.start()
        try:
            yield
        except BaseException as error:
            self._end_launch(error)
        done.set()
        watch.join()
        self.add("left")
        if self.rank == 0:  # this process may hold the store that the others speak through
            self.wait_for("left", dist.get_world_size())

    def _watch(self, done: threading.Event) -> None:
        try:
            while self.add("failed", 0) == 0:
                if done.wait(POLL_SECONDS):
                    return
        except RuntimeError:  # the store's own process is gone
            pass
        if not done.wait(GRACE_SECONDS):
            _leave(1)

    def _end_launch(self, error: BaseException) -> None:
        # A collective fails when its peer is gone. Then the launcher, which sees that end, has the true reason.
        if _raised_by_collective(error):
            time.sleep(GRACE_SECONDS)
        try:
            first = self.add("failed") == 1
        except RuntimeError:
            first = False
        if not first:
            time.sleep(GRACE_SECONDS)
            _leave(1)
        if not isinstance(error, (*_USER_ERRORS, KeyboardInterrupt)) or _raised_by_collective(error):
            traceback.print_exception(error)
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
        print(f"\nerror: rank {self.rank}: {reason}", file=sys.stderr)  # on a line after a progress bar's
        _leave(1)


def _raised_by_collective(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("torch.distributed") for frame, _ in frames)


def _leave(code: int) -> None:
    """Ends the process now: the ordinary way would wait for communicators whose peers are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
