"""A comparison as one HTML page with plots: no scripts, nothing fetched from elsewhere. Pure."""

from collections.abc import Sequence
from html import escape

from service.simulation.comparing import Comparison

WIDTH, HEIGHT, POINTS_MAX = 900, 220, 2_000
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ccc}"
    "td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto;border:1px solid #ccc}"
)


def page_of(comparison: Comparison) -> str:
    """The whole page."""
    facts, ours = comparison.facts(), comparison.runs[0]
    offered = comparison.trace.counts()
    used = [(at_s, nodes) for at_s, _, nodes, _ in ours.layouts]
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{run.goodput:.4f}</td><td>{run.tokens / 1e6:,.1f}</td><td>{run.usd:,.2f}</td>"
        f"<td>{run.usd_per_mtok:.4g}</td><td>{run.changes}</td></tr>"
        for name, run in zip(comparison.names, comparison.runs, strict=True)
    )
    lost = "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{tokens / ours.ideal_tokens if ours.ideal_tokens else 0:.4f}"
        "</td></tr>"
        for name, tokens in ours.tokens_lost_by
    )
    decisions = "".join(
        f"<tr><td>{at_s / 3_600:.2f} h</td><td>{escape(decision.verdict.value)}</td>"
        f"<td style='text-align:left'>{escape(decision.reason)}</td></tr>"
        for at_s, decision in ours.decisions[:200]
    )
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(comparison.trace.name)}</title>"
        f"<style>{_STYLE}</style><h1>{escape(comparison.trace.name)}</h1>"
        f"<p>{facts['hours']:.1f} hours. Distance to the count oracle {facts['regret_count_oracle']:.3%}, to the "
        f"victim oracle {facts['regret_victim_oracle']:.3%}. Goodput is the share of the free ideal.</p>"
        "<h2>Nodes</h2><p>Grey: offered. Blue: used.</p>"
        + _plot([("#999", offered), ("#06c", used)], comparison.trace.end_s)
        + "<h2>Policies</h2><table><tr><th>policy</th><th>goodput</th><th>M tokens</th><th>USD</th>"
        f"<th>USD per M tokens</th><th>changes</th></tr>{rows}</table>"
        f"<h2>Where tokens went, as a share of the ideal</h2><table>{lost}</table>"
        f"<h2>Decisions</h2><p>The first 200.</p><table>{decisions}</table></html>\n"
    )


def _plot(lines: Sequence[tuple[str, Sequence[tuple[float, int]]]], end_s: float) -> str:
    top = max((count for _, points in lines for _, count in points), default=1) or 1
    drawn = "".join(
        f"<path fill='none' stroke='{colour}' stroke-width='1.5' d='{_steps(points, end_s, top)}'/>"
        for colour, points in lines
        if points
    )
    label = f"<text x='4' y='14' font-size='12'>{top} nodes</text>"
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='Nodes over time'>{drawn}{label}</svg>"


def _steps(points: Sequence[tuple[float, int]], end_s: float, top: int) -> str:
    shown = points[:: max(1, len(points) // POINTS_MAX)]
    scale_x, scale_y = WIDTH / max(end_s, 1.0), (HEIGHT - 20) / top
    parts = []
    for index, (at_s, count) in enumerate(shown):
        x, y = at_s * scale_x, HEIGHT - count * scale_y
        parts.append(f"{'M' if not index else 'H'}{x:.1f}" + (f",{y:.1f}" if not index else f"V{y:.1f}"))
    return " ".join(parts) + f" H{WIDTH}"
