"""What a policy wants stands in the plan of a job, with the options that it was chosen from."""

from service.cli import changing

WANTED = {
    "layout": "TP1xPP4xDP1", "place": "", "nodes": 4, "spares": 1, "usd_per_hour": 5.0, "usd_per_hour_worth": 55.0,
    "gives_back": ["f"], "reason": "",
    "pools": [
        {"pool": "a", "place": "", "market": "spot", "usd_per_hour": 1.0, "held": 3, "hold": 5},
        {"pool": "a", "place": "z1", "market": "on_demand", "usd_per_hour": 3.0, "held": 0, "hold": 0},
    ],
    "weighed": [
        {"layout": "TP1xPP4xDP1", "place": "here", "nodes": 4, "spares": 1, "hold": [["a", 5]], "usd_per_hour": 5.0,
         "utility_usd_per_hour": 55.0}
    ],
}  # fmt: skip
PLAN = {
    "job_id": "demo-1", "verdict": "stay", "verdict_reason": "nothing is better", "layout": None, "nodes": [],
    "action": None, "reason": "", "alternatives": [], "options": [], "losses": [], "wanted": WANTED,
}  # fmt: skip


class Answers:
    def get(self, path: str, **_: object) -> dict:
        assert path == "/api/v1/jobs/demo-1/plan"
        return PLAN


def test_a_plan_shows_what_the_job_should_hold_and_what_was_weighed(monkeypatch, capsys):
    monkeypatch.setattr(changing, "connect", lambda *_: Answers())
    monkeypatch.setattr(changing, "find_job", lambda _, job_id: job_id)
    changing.plan("demo-1")
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert any("TP1xPP4" in line and "on 4 nodes and 1 spare" in line for line in lines), shown
    assert any(line.startswith("a any spot 3 5 1.00") for line in lines), shown
    assert any(line.startswith("a z1 on demand 0 0 3.00") for line in lines), shown
    assert any(line.endswith("here 4 1 5 a 5.00 55.00") for line in lines), shown
    assert any(line.startswith("no use for") and line.endswith("f") for line in lines), shown
