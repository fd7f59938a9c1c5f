"""The traces, prices and measured step times that the benchmark reads, from a folder that is no part of this tree."""

import csv
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from service.policy.types import Candidate
from service.simulation.moving import Link
from service.simulation.places import PlaceSeries
from service.simulation.traces import CapacityTrace, of_counts, read_trace

TRACES = {"p3": "bamboo/p3-trace.csv", "g4dn": "bamboo/g4dn-trace.csv", "gcp_scaled": "oobleck/scale_gcp-trace.csv"}
H100_TICK_S, V100_TICK_S = 600.0, 195.0
V100_ON_DEMAND_USD, V100_ON_DEMAND_ZONE = 3.06, "us-east-1a"
MACHINE = "a3-highgpu-8g"
NEAR_ON_AWS = {
    "us-central1": "us-east-2", "us-east4": "us-east-1", "us-east5": "us-east-2", "us-west1": "us-west-2",
    "europe-west1": "eu-west-1", "europe-west3": "eu-central-1", "asia-southeast1": "ap-southeast-1",
    "asia-south2": "ap-south-1",
}  # fmt: skip
"""GCP's own prices of egress are not in the data."""
A40_BATCH, A40_TOKENS = 1_024, 1_024 * 2_048


def trace(folder: Path, name: str) -> CapacityTrace:
    return replace(read_trace(name, (folder / TRACES[name]).read_text()), name=name)


def measured_layouts(folder: Path, model: str, change_s: float) -> tuple[Candidate, ...]:
    """Of Parcae's measured table, on V100 nodes of one GPU."""
    found = []
    with (folder / "parcae/measured_step_times.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["model"] == model:
                found.append(
                    Candidate(
                        f"PP{row['pp']}xDP{row['dp']}",
                        int(row["nodes"]),
                        float(row["step_ms"]) / 1e3,
                        int(row["global_batch"]) * int(row["seq_length"]),
                        is_measured=True,
                        change_s=change_s,
                    )
                )
    return tuple(found)


def long_steps(folder: Path, change_s: float) -> tuple[Candidate, ...]:
    """Of the artifact of Oobleck: GPT-3 6.7B in batches of 1,024 on 15 to 30 A40 nodes, steps of some 200 s."""
    with (folder / "oobleck/throughput_by_nodes.csv").open(newline="") as file:
        rates: dict[int, float] = {}
        for row in csv.DictReader(file):
            if "6.7" in row["model"]:
                nodes = int(row["nodes"])
                rates[nodes] = max(rates.get(nodes, 0.0), float(row["samples_per_s"]))
    return tuple(
        Candidate(f"A40xDP{nodes}", nodes, A40_BATCH / rate, A40_TOKENS, is_measured=True, change_s=change_s)
        for nodes, rate in sorted(rates.items())
        if rate > 0
    )


def h100(folder: Path) -> tuple[PlaceSeries, list[str]]:
    """Thirteen zones of GCP at the prices of 8 H100 in October 2025, and the region of each zone."""
    counts: dict[str, dict[str, int]] = {}
    with gzip.open(folder / "skynomad/h100_16_counts.csv.gz", "rt", newline="") as file:
        for row in csv.DictReader(file):
            counts.setdefault(row["zone"], {})[row["utc_time"]] = int(row["created"])
    times = sorted({at for row in counts.values() for at in row})
    ticks = int((_seconds(times[-1]) - _seconds(times[0])) // H100_TICK_S) + 1
    zones = sorted(counts)
    prices, on_demand = {}, []
    for path in sorted((folder / "skynomad/spot_price_cache-gcp").glob("*.json")):
        found = json.loads(path.read_text())
        prices[found["region"]] = float(found["price"])
        on_demand.append(float(found["on_demand_price"]))
    regions = [zone.rsplit("-", 1)[0] for zone in zones]
    rows = tuple(_gridded(counts[zone], times[0], ticks) for zone in zones)
    usd = tuple((prices[region],) * ticks for region in regions)
    return PlaceSeries(H100_TICK_S, tuple(zones), rows, usd, min(on_demand)), regions


def h100_on_demand_zone(folder: Path) -> str:
    """A zone of the region in which 8 H100 on demand cost least."""
    found = [json.loads(path.read_text()) for path in (folder / "skynomad/spot_price_cache-gcp").glob("*.json")]
    return min((float(each["on_demand_price"]), f"{each['region']}-any") for each in found)[1]


def _gridded(seen: dict[str, int], first: str, ticks: int) -> tuple[int, ...]:
    """One count for each tick; what was not probed is as it was before."""
    by_tick = {int((_seconds(at) - _seconds(first)) // H100_TICK_S): count for at, count in seen.items()}
    row, last = [], 0
    for tick in range(ticks):
        last = by_tick.get(tick, last)
        row.append(last)
    return tuple(row)


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def v100(folder: Path) -> PlaceSeries:
    """Nine zones of AWS at their prices of every tick, February to April 2023."""
    with gzip.open(folder / "skynomad/v100_spot_prices.json.gz", "rt") as file:
        prices = json.load(file)
    rows, usd, names = [], [], []
    for path in sorted((folder / "skynomad/v100-9zone-2023-02-15").glob("*.csv.gz")):
        zone = path.name.removesuffix(".csv.gz")
        with gzip.open(path, "rt", newline="") as file:
            rows.append([int(float(row["availability"])) for row in csv.DictReader(file)])
        usd.append([float(price) for price in prices.get(zone) or prices[zone.split("_")[0]]])
        names.append(zone.split("_")[0])
    ticks = min(len(row) for row in (*rows, *usd))
    return PlaceSeries(
        V100_TICK_S,
        tuple(names),
        tuple(tuple(row[:ticks]) for row in rows),
        tuple(tuple(row[:ticks]) for row in usd),
        V100_ON_DEMAND_USD,
    )


def links(folder: Path) -> Callable[[str, str], Link]:
    """Between two zones, by name. USD: AWS's prices between regions, for regions of GCP those of AWS's that are near;
    inside a region, and where two have the same one near, what GCP takes. Bandwidth: the median of what one GPU
    reaches between zones of GCP, of one region and of two."""
    with (folder / "skynomad/aws_egress_pricing.csv").open(newline="") as file:
        rows = csv.DictReader(file)
        usd = {(row["from_region"], row["to_region"]): float(row["price_usd_per_gb"]) for row in rows}
    paid: dict[bool, float] = {True: 0.0, False: 0.0}
    for source, row in json.loads((folder / "sailor/communication_cost.json").read_text()).items():
        for target, price in row.items():
            is_near = region_of(source) == region_of(target)
            paid[is_near] = max(paid[is_near], float(price))
    near, far = _bandwidths(json.loads((folder / "sailor/multizone_bandwidths.json").read_text()))

    def link(source: str, target: str) -> Link:
        one, other = region_of(source), region_of(target)
        if one == other:
            return Link(paid[True], near)
        on_aws = NEAR_ON_AWS.get(one, one), NEAR_ON_AWS.get(other, other)
        return Link(usd.get(on_aws, paid[False]), far)

    return link


def _bandwidths(found: dict[str, Any]) -> tuple[float, float]:
    """Bytes per second between zones of one region, and of two."""
    seen: dict[bool, list[float]] = {True: [], False: []}
    for source, senders in found.items():
        for gpu, counts in senders.items():
            for target, receivers in counts.get("1", {}).items():
                peak = receivers.get(gpu, {}).get("1")
                if source != target and peak is not None:
                    seen[region_of(source) == region_of(target)].append(float(peak[1]))
    return median(seen[True]), median(seen[False])


def region_of(zone: str) -> str:
    """`us-east-1` of `us-east-1a`, `us-central1` of `us-central1-b`."""
    return zone.rsplit("-", 1)[0] if zone.rsplit("-", 1)[1].isalpha() else zone.rstrip("abcdef")


def monthly_prices(folder: Path) -> dict[str, dict[str, tuple[float, float]]]:
    """Month -> region -> USD per hour of 8 H100 (spot, on demand)."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    with (folder / "gcp-prices/gcp-gpu-prices.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["machine_type"] == MACHINE and row["usd_per_hour_spot"]:
                price = float(row["usd_per_hour_spot"]), float(row["usd_per_hour_on_demand"])
                found.setdefault(row["date"][:7], {})[row["region"]] = price
    return found


def zone_trace(series: PlaceSeries, place: int, begin: int, end: int) -> CapacityTrace:
    """The counts of one zone between two ticks."""
    row = series.offered[place][begin:end]
    pairs = [(at * series.tick_s, count) for at, count in enumerate(row) if not at or count != row[at - 1]]
    return of_counts(series.places[place], pairs, len(row) * series.tick_s)
