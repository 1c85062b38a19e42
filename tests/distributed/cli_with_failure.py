"""Run by `accelerate launch`: the command line, in which rank 1 fails or is killed when it starts its second chunk.

    accelerate launch ... cli_with_failure.py FOLDER killed|raises generate ...
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

from bc_diffusers import VideoStream


if __name__ == "__main__":
    folder, how, *arguments = sys.argv[1:]
    original = VideoStream.__next__

    def failing(self):
        if os.environ["RANK"] == "1" and self.next_index == 1:
            (Path(folder) / "failed_at").write_text(str(time.time()))
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the paint ran out")
        return original(self)

    VideoStream.__next__ = failing
    sys.argv[1:] = arguments
    runpy.run_module("bc_diffusers.cli", run_name="__main__")  # as `-m bc_diffusers.cli`
