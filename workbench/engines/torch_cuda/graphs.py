"""One token as CUDA graphs: all that the card does between two FFNs is one launch.

The host asks for each operation of a token by itself, some dozens a layer, and the card is done with each long before
the next is asked for. So the operations from one FFN's output to the next one's list of neurons are recorded once, from
transformers' own forward pass, and are then launched as a whole. What depends on the token is data: the token, its
position, the mask over the KV cache (whose capacity is attended to), how sure a neuron must be to be read ahead.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.engines.torch_cuda.card import PAGE, Card, Pinned
from workbench.flash.layout import round_up

if TYPE_CHECKING:
    from workbench.engines.torch_cuda.ffn import CardFFN

TOKEN_BYTES = 16  # a token and its position, int64 each
DYNAMIC_ROPES = ("dynamic", "longrope")  # transformers reads the position back from the card


def recordable(config: Any) -> bool:
    """Whether a model's forward pass is the same operations for every token, given its position and a mask."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    return not getattr(config, "alibi", False) and kind not in DYNAMIC_ROPES


class TokenGraphs:
    """The graphs of one setting and one KV cache; the first token is run, the second recorded, others are launched.

    layers: FFNs of the model. d_ff: neurons of each. capacity: tokens of the KV cache. Uses one CUDA stream of its own
    (`Card.apart`), in which all its methods are to be called.
    """

    def __init__(self, card: Card, layers: int, d_ff: int, capacity: int) -> None:
        self._card, self.tokens = card, 0
        nbytes = TOKEN_BYTES + 4 * layers
        self._host = Pinned(round_up(nbytes, PAGE), card.on_gpu)
        self._given = torch.zeros(len(self._host.tensor), dtype=torch.uint8, device=card.device)
        whole = self._given[:TOKEN_BYTES].view(torch.int64)
        self.ids, self.position = whole[:1].view(1, 1), whole[1:]
        self.margins = self._given[TOKEN_BYTES:nbytes].view(torch.float32)
        self._places = torch.arange(capacity, device=card.device)
        self.lists = Pinned(round_up(8 * (d_ff + 1), PAGE), card.on_gpu)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._open: torch.cuda.CUDAGraph | None = None
        self._pool: Any = None
        self.logits: torch.Tensor | None = None

    @property
    def recording(self) -> bool:
        """Whether operations are being recorded, and not run, at present."""
        return self._open is not None

    @property
    def whole(self) -> bool:
        """Whether all of a token has been recorded."""
        return self.logits is not None

    def given(self, token: int, position: int, margins: list[float]) -> None:
        """Send what the next token depends on."""
        self._host.bytes[:TOKEN_BYTES].view(np.int64)[:] = token, position
        self._host.bytes[TOKEN_BYTES : TOKEN_BYTES + 4 * len(margins)].view(np.float32)[:] = margins
        self._given.copy_(self._host.tensor, non_blocking=True)

    def mask(self) -> torch.Tensor:
        """bool [1, 1, 1, capacity]: the tokens so far, with the present one."""
        return (self._places <= self.position).view(1, 1, 1, -1)

    # recording

    def record(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """forward() gives the logits and goes through `cut` in each FFN; the token is run while it is recorded."""
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()  # graphs that nobody has any more cannot be given back while others are recorded
        torch.cuda.synchronize()
        try:
            self._begin()
            logits = forward()
            self._end()
        except BaseException:
            self._abandon()
            raise
        self.logits = logits
        return logits

    def cut(self, ffn: Callable[[], None]) -> None:
        """Between two graphs: run what was recorded, then ffn(), which is not."""
        self._end()
        ffn()
        self._begin()

    def _begin(self) -> None:
        self._open = torch.cuda.CUDAGraph()
        self._open.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        graph = self._open
        assert graph is not None
        graph.capture_end()
        self._open = None
        graph.replay()
        self._graphs.append(graph)

    def _abandon(self) -> None:
        graph, self._open = self._open, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):  # what was wrong has been raised already
                graph.capture_end()
        self._graphs.clear()

    def close(self) -> None:
        """Give the graphs back."""
        self._graphs.clear()
        self.logits = None

    # launching

    def launch(self, ffns: list[CardFFN]) -> torch.Tensor:
        """A token, once all has been recorded: the logits."""
        assert self.logits is not None
        for graph, ffn in zip(self._graphs, ffns, strict=False):
            graph.replay()
            ffn.between_graphs()
        self._graphs[-1].replay()
        return self.logits

    @contextmanager
    def fixed(self, layers: Any) -> Iterator[None]:
        """Within it, layers of the KV cache put keys and values where `position` says, and give back all places."""
        for layer in layers:
            layer.at = self.position
        try:
            yield
        finally:
            for layer in layers:
                layer.at = None
