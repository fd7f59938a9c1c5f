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
    for name, plan, numel in cases():
        region = torch.randn(numel)
        plan.sums(region, "master")
        spent = []
        for _ in range(options.repeats):
            start = time.process_time()
            plan.sums(region, "master")
            spent.append((time.process_time() - start) / plan.elements * 1e9)
        spent.sort()
        print(f"{name:24} {spent[len(spent) // 2]:7.2f} ({spent[0]:.2f} to {spent[-1]:.2f})")


def cases():
    """(name, plan, elements of the region): 4 Mi elements each, the last a model's worth of small vectors."""
    whole = ResidentBox("w", Box((0, 0), (2048, 2048)), 0)
    yield "one whole matrix", CertificatePlan([whole], {"w": (2048, 2048)}), ELEMENTS
    for width in (1024, 256, 64, 16):
        rows = ELEMENTS // width
        box = ResidentBox("w", Box((0, width), (rows, 2 * width)), 0)
        yield f"rows of {width}", CertificatePlan([box], {"w": (rows, 4 * width)}), ELEMENTS
    names = [f"v{at}" for at in range(200)]
    small = [ResidentBox(name, Box((0,), (256,)), 256 * at) for at, name in enumerate(names)]
    yield "200 vectors of 256", CertificatePlan(small, dict.fromkeys(names, (256,))), 200 * 256


if __name__ == "__main__":
    main()
