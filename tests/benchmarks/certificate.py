"""Measures the certificate: CPU time for an element, for boxes of several shapes and for many small parameters.

Run from the root of the tree: python -m tests.benchmarks.certificate [--repeats 9]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from liver_core.certificate import CertificatePlan
from liver_core.layout import Box, ResidentBox

ELEMENTS = 4 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    print(f"numpy {np.__version__}; ns of CPU for an element, median (least to most) of {options.repeats} runs")
    for name, plan, numel in (case for paired in (False, True) for case in cases(paired=paired)):
        region = torch.randn(numel)
        plan.sums(region, "master")
        spent = []
        for _ in range(options.repeats):
            start = time.process_time()
            plan.sums(region, "master")
            spent.append((time.process_time() - start) / plan.elements * 1e9)
        spent.sort()
        print(f"{name:34} {spent[len(spent) // 2]:7.2f} ({spent[0]:.2f} to {spent[-1]:.2f})")


def cases(*, paired: bool):
    """(name, plan, elements of the region): 4 Mi elements each, the last a model's worth of small vectors."""
    word = "pairs" if paired else "elements"

    def plan(boxes: list[ResidentBox], shapes: dict[str, tuple[int, ...]]) -> CertificatePlan:
        return CertificatePlan(boxes, shapes, paired=tuple(shapes) if paired else ())

    whole = ResidentBox("w", Box((0, 0), (2048, 2048)), 0)
    yield f"{word}: one whole matrix", plan([whole], {"w": (2048, 2048)}), ELEMENTS
    for width in (1024, 256, 64, 16):
        rows = ELEMENTS // width
        box = ResidentBox("w", Box((0, width), (rows, 2 * width)), 0)
        yield f"{word}: rows of {width}", plan([box], {"w": (rows, 4 * width)}), ELEMENTS
    names = [f"v{at}" for at in range(200)]
    small = [ResidentBox(name, Box((0,), (256,)), 256 * at) for at, name in enumerate(names)]
    yield f"{word}: 200 vectors of 256", plan(small, dict.fromkeys(names, (256,))), 200 * 256


if __name__ == "__main__":
    main()
