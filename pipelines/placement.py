"""Where the pipeline's models and caches are: moving, offloading, and what that means for idle caches."""

import contextlib

from .resources import on_device


class PlacementMixin:
    """Idle caches stay on the device that the pipeline runs on; those left behind on another one are freed.

    CPU offload moves the models to and fro, but not the place where they run: there the caches stay.
    """

    _offloading = False

    def to(self, *args, **kwargs):
        """As `DiffusionPipeline.to`. A stream that is alive keeps its cache and goes on once the pipeline is back."""
        pipe = super().to(*args, **kwargs)
        self._free_strays()
        return pipe

    def enable_model_cpu_offload(self, *args, **kwargs) -> None:
        """As `DiffusionPipeline.enable_model_cpu_offload`. The VAE stays: it decodes after every chunk."""
        with self._models_move():
            super().enable_model_cpu_offload(*args, **kwargs)

    def enable_sequential_cpu_offload(self, *args, **kwargs) -> None:
        """As `DiffusionPipeline.enable_sequential_cpu_offload`; slow, and the VAE stays on the device."""
        with self._models_move():
            super().enable_sequential_cpu_offload(*args, **kwargs)

    def enable_group_offload(self, *args, **kwargs) -> None:
        """As `DiffusionPipeline.enable_group_offload`; the VAE may be offloaded with the others."""
        with self._models_move():
            super().enable_group_offload(*args, **kwargs)

    @contextlib.contextmanager
    def _models_move(self):
        """Offloading calls `to("cpu")` on its way, also each time it frees the models after a stream."""
        outermost, self._offloading = not self._offloading, True
        try:
            yield
        finally:
            if outermost:
                self._offloading = False
                self._free_strays()

    def _free_strays(self) -> None:
        if not self._offloading:
            self._stock.free(keep=on_device(self._execution_device))
