"""The web demo, imported as bc_diffusers.demo: `serve(pipe)` or `bc-diffusers serve`. docs/demo.md tells more."""

import os
from importlib.util import find_spec

from .limits import Limits as Limits


def check_installed() -> None:
    """Raises a RuntimeError that says what to install, if gradio is missing."""
    if find_spec("gradio") is None:
        raise RuntimeError('the demo needs gradio: pip install "bc_diffusers[demo]"')


def serve(pipe, limits: Limits | None = None, host: str = "127.0.0.1", port: int | None = None,
          share: bool = False) -> "Demo":  # noqa: F821
    """Starts the web demo of a pipeline and returns at once.

    Args:
        pipe (`BlockCausalVideoPipeline`): on its device.
        limits (`Limits`, *optional*): what visitors may ask for.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): where to listen; `"0.0.0.0"` lets the network in.
        port (`int`, *optional*): the first free one from 7860 on.
        share (`bool`, *optional*, defaults to `False`): also a public address through Gradio's tunnel.

    Returns:
        `Demo` with `url`, `share_url`, `wait()` and `close()`.

    Raises:
        RuntimeError: if gradio is not installed.
    """
    check_installed()
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read whenever gradio is about to send something
    pipe.set_progress_bar_config(disable=True)
    from .server import Demo

    demo = Demo(pipe, limits or Limits())
    try:
        demo.launch(host, port, share)
    except BaseException:
        demo.close()
        raise
    return demo
