"""Every placement can be explained: candidates, three terms, gates, the lease and its fate."""

from __future__ import annotations

import json

import pytest

from talaria.policy.explain import Explanation
from talaria.policy.snapshot import Residency
from tests.policy.clusters import call, finish, key, model, router, snapshot

RETURN = call(2, prompt=1300, reusable=1100)


def explained(*snapshots: object, **knobs: object) -> Explanation:
    return router(*snapshots, **knobs).explain(call(1), 0.0)


def failed_gates(explanation: Explanation, at: int) -> list[str]:
    return [gate.name for gate in explanation.candidates[at].gates if not gate.passed]


def test_each_failed_gate_is_named_for_its_instance() -> None:
    busy = {"m": model(queued=1)}
    explanation = explained(
        snapshot("round", busy, round_load_s=9.0),
        snapshot("hbm", {"m": model(free_kv_tokens=10)}),
        snapshot("replica", {"m": model(Residency.ABSENT)}),
        snapshot("serves", {"n": model()}),
        snapshot("healthy", {"m": model()}, healthy=False),
        snapshot("good", {"m": model(queued=1, queued_work_s=0.1)}, round_load_s=1.0),
    )
    assert [failed_gates(explanation, at) for at in range(4)] == [["round"], ["hbm"], ["replica"], ["serves"]]
    assert failed_gates(explanation, 4) == ["healthy", "fresh"]
    assert (explanation.chosen, explanation.reason) == ("good", "cost")


def test_the_chosen_candidate_is_the_cheapest_admissible_one() -> None:
    explanation = explained(*(snapshot(f"i{n}", {"m": model(queued_work_s=float(n % 3), queued=1)}) for n in range(5)))
    admissible = [item for item in explanation.candidates if item.admissible and item.terms is not None]
    assert explanation.chosen == min(admissible, key=lambda item: item.terms.cost_s).instance


def test_the_lease_that_was_honoured_or_discarded_is_named_with_its_reason() -> None:
    made = router(snapshot("a", {"m": model()}))
    finish(made, call(1), "a", 1.0)
    assert made.explain(RETURN, 1.5).lease == "on a until 2.000 s, honoured"
    made.observe(snapshot("a", {"m": model()}, 2, 1.2), 1.2)
    assert made.explain(RETURN, 1.5).lease == "on a until 2.000 s, discarded: the prefix is neither on the device nor restorable"
    assert made.explain(call(3, key("new")), 1.5).lease == "none"


@pytest.mark.parametrize(
    ("name", "note"), [("least-pressure", "pressure 0.000"), ("round-robin", "next in turn"), ("session-sticky", "pressure 0.000")]
)
def test_the_simpler_routers_show_what_they_look_at(name: str, note: str) -> None:
    explanation = explained(snapshot("a", {"m": model()}), name=name)
    assert explanation.candidates[0].note == note


def test_a_sticky_session_s_home_is_named() -> None:
    made = router(snapshot("a", {"m": model()}), snapshot("b", {"m": model()}), name="session-sticky")
    made.place(call(1), 0.0)
    assert made.explain(call(2), 0.0).candidates[0].note == "home of the session"


def test_the_text_has_a_line_per_candidate_and_marks_the_chosen_one() -> None:
    lines = explained(snapshot("a", {"m": model(queued_work_s=5.0)}), snapshot("b", {"m": model()})).text().splitlines()
    assert lines[0].startswith("call 1 (m) at 0.000 s: b by cost; lease: none")
    assert lines[1].startswith("  a  cost 5.") and "all gates passed" in lines[1]
    assert lines[2].startswith("→ b  cost 0.")


def test_an_explanation_is_plain_json_with_every_term_and_gate() -> None:
    explanation = explained(snapshot("a", {"m": model()}), snapshot("b", {"n": model()}))
    document = json.loads(json.dumps(explanation.as_dict(), allow_nan=False))
    served, other = document["candidates"]
    terms = explanation.candidates[0].terms
    assert terms is not None and (served["terms"], served["cost_s"]) == (terms._asdict(), terms.cost_s)
    assert {gate["name"]: gate["passed"] for gate in other["gates"]}["serves"] is False and other["terms"] is None


def test_an_overload_is_explained_without_a_chosen_instance() -> None:
    explanation = explained(snapshot("a", {"m": model(queued=1)}, round_load_s=9.0), overload="shed")
    assert (explanation.chosen, explanation.reason) == (None, "shed")
    assert "failed: round (adds " in explanation.text()
