"""Another current stream for a while, without what torch.cuda.stream does besides."""

from __future__ import annotations

import torch


class on:
    """`torch.cuda.stream`, for streams of the current device: that looks up devices, for longer than a launch takes."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch.cuda.current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)
