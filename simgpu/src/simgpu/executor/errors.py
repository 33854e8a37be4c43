"""Errors of the executor."""

import numpy as np


class UnknownPtxError(Exception):
    """PTX that the executor does not know."""


class FaultError(Exception):
    """Something that the compiled code must not do, and where it does it."""


class LaneError(Exception):
    """A fault as an instruction sees it: a lane and what is wrong; `Machine` adds the place."""

    def __init__(self, lane: int | np.integer, what: str) -> None:
        super().__init__(what)
        self.lane = int(lane)
