"""CUDA graphs of a transformer's cached forward: one replay instead of a thousand launches.

Everything a cached forward reads besides its inputs keeps its address (the cache's tensors, the rotary tables), and
positions are device values, so a graph captured in the first chunk serves every later one, before and after the window
is full, and after a reopen of the cache.
"""

import contextlib
import gc
import logging
from collections.abc import Callable, Hashable, Iterator

import torch


_logger = logging.getLogger(__name__)
_MOST_GRAPHS = 32  # a geometry needs a handful; more come from inputs whose shapes keep changing


def _states(model: torch.nn.Module) -> Iterator[dict]:
    """The `__dict__` of every module. Both functions below look at each before every chunk, so this costs less than
    `modules()`; a module in two places comes twice."""
    stack = [model]
    while stack:
        state = stack.pop().__dict__
        yield state
        stack.extend(module for module in state["_modules"].values() if module is not None)


def model_fingerprint(model: torch.nn.Module) -> int:
    """Changes whenever what a captured forward of `model` reads or runs may have changed: weights that moved, were
    fused, quantized or replaced, LoRA layers and their scales, processors, hooks, compilation. In-place updates of
    weights do not count: a graph reads the new values. Costs about a microsecond a module."""
    parts = []
    for state in _states(model):
        parts += (id(state), state["training"], id(state.get("_compiled_call_impl")), id(state.get("forward")),
                  len(state["_forward_hooks"]) + len(state["_forward_pre_hooks"]))
        for tensors in (state["_parameters"], state["_buffers"]):
            for t in tensors.values():
                if t is not None:
                    parts += (id(t), _address(t))
        processor = state.get("processor")
        if processor is not None:
            parts += (id(processor), str(getattr(processor, "_attention_backend", None)),
                      id(getattr(processor, "_parallel_config", None)))
        if "scaling" in state:  # a LoRA layer: its scales are numbers in the host's code
            parts += (tuple(sorted(state["scaling"].items())), str(state.get("_active_adapter")),
                      state.get("_disable_adapters"), tuple(state.get("merged_adapters", ())))
    return hash(tuple(parts))


def why_not(model: torch.nn.Module) -> str | None:
    """Why forwards of `model` cannot be captured, or None: offloading moves weights between forwards, other hooks keep
    state in Python that a replay would not run."""
    for state in _states(model):
        if state.get("_hf_hook") is not None:
            return "CPU offloading moves its weights"
        hooks = getattr(state.get("_diffusers_hook"), "hooks", None)
        if hooks:
            return f"hooks run in it: {', '.join(hooks)}"
    return None


def _address(t: torch.Tensor) -> int:
    try:
        return t.data_ptr()
    except RuntimeError:  # tensor subclasses (quantized weights) that hold others: replaced, not rewritten
        return 0


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool, device: torch.device) -> Iterator[None]:
    """`torch.cuda.graph`, but a capture that fails leaves no trace: torch would go on with the capture's stream, a
    default generator that believes it is captured, and an allocator that waits for the capture's end."""
    with torch.cuda.device(device):
        before = torch.cuda.current_stream()
        gc.collect()  # what is collected in the midst of a capture may call what the driver then forbids
        enabled = gc.isenabled()
        gc.disable()
        try:
            # Threads that use other streams (a server's, a decoder's) may go on allocating meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                yield
        except BaseException:
            torch.cuda.set_stream(before)
            generator = torch.cuda.default_generators[device.index]
            with contextlib.suppress(RuntimeError):
                generator.graphsafe_set_state(generator.clone_state())
            with contextlib.suppress(RuntimeError):  # the capture did come to its end
                torch._C._cuda_endAllocateToPool(device.index, pool)
            raise
        finally:
            if enabled:
                gc.enable()


class _Captured:
    def __init__(self, graph, inputs, output):
        self.graph, self.inputs, self.output = graph, inputs, output


class GraphRunner:
    """Captures a function of tensors once a key, and replays it from then on.

    The first call of a key runs the function (which also warms it up: kernels load, libraries build) and captures it;
    its result is that run's. Later calls copy their inputs to the captured addresses and replay. All graphs share one
    memory pool, so a result is valid until the next call of the runner: use it up, or clone it.

    A function that cannot be captured (it waits for the device, say) is run every time; one warning says why. If it
    holds collectives, ranks decide that together (`refresh`): NCCL wants a launch to be captured on all of them or on
    none.
    """

    def __init__(self):
        self._graphs: dict[Hashable, _Captured | None] = {}
        self._pool = None
        self._fingerprint: int | None = None
        self._group = None
        self.captures = self.replays = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(self, key: Hashable, function: Callable[..., torch.Tensor], inputs: dict[str, torch.Tensor]
                 ) -> torch.Tensor:
        """`function(**inputs)`.

        Args:
            key: whatever else decides what `function` does; shapes and dtypes of `inputs` are added to it.
            function: must give the same result when it runs twice, and return one tensor.
            inputs: tensors on one CUDA device.
        """
        key = (key, *((name, t.shape, t.dtype, t.device) for name, t in inputs.items()))
        if key not in self._graphs:
            return self._capture(key, function, inputs)
        captured = self._graphs[key]
        if captured is None:
            return function(**inputs)
        for name, t in captured.inputs.items():
            t.copy_(inputs[name], non_blocking=True)
        captured.graph.replay()
        self.replays += 1
        return captured.output

    def _capture(self, key, function, inputs) -> torch.Tensor:
        if len(self._graphs) >= _MOST_GRAPHS:
            self.clear()
        result = function(**inputs)
        captured = self._try_to_capture(function, inputs, result.device)
        if self._group is not None and not self._group.all_agree(captured is not None, result.device):
            if captured is not None:
                _logger.warning("a forward cannot be captured in a CUDA graph on another rank and is launched kernel "
                                "by kernel on all")
            captured = None
        if captured is None:
            self._pool = None  # no more captures into a pool that one has failed in
        else:
            self.captures += 1
        self._graphs[key] = captured
        return result

    def _try_to_capture(self, function, inputs, device) -> _Captured | None:
        static = {name: t.clone() for name, t in inputs.items()}
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self._pool, device):
                output = function(**static)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _logger.warning("a forward cannot be captured in a CUDA graph and is launched kernel by kernel: %s",
                            str(error.__context__ or error).splitlines()[0])
            return None
        return _Captured(graph, static, output)

    def refresh(self, model: torch.nn.Module, group=None) -> None:
        """Drops the graphs if `model` or `group` is not what it was when they were captured.

        Args:
            group (`UlyssesGroup`, *optional*): the ranks whose collectives the graphs hold. They make the same calls
                in the same order; a key is replayed only if all of them captured it.
        """
        fingerprint = model_fingerprint(model)
        if fingerprint != self._fingerprint or group is not self._group:
            self.clear()
            self._fingerprint, self._group = fingerprint, group

    def clear(self) -> None:
        """Drops all graphs; their memory is free again once no result is held any more."""
        self._graphs.clear()
        self._pool = None
