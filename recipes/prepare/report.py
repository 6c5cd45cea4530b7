"""The report of a training set, for people."""

from __future__ import annotations

from typing import Any


def markdown(facts: dict[str, Any]) -> str:
    """``report.md`` from what the manifest holds."""
    lines = ["# Training set", "", f"{facts['rows']} rows, sha256 of the rows `{facts['rows_sha256']}`.", ""]
    if facts["rows_as_published"]:
        lines += [f"As published, before any of the steps below: {facts['rows_as_published']} rows.", ""]
    lines += ["| set | from | commit | rows read | different texts | kept |", "|---|---|---|---|---|---|"]
    for one in facts["sets"]:
        pin = (
            f"`{one['commit']}`{'' if one['pinned'] else ' (newest when it was read)'}"
            if one["commit"]
            else "local copy"
        )
        lines.append(
            f"| {one['name']} | {one['lineage']} | {pin} | {one['rows']} | {one['different_texts']} | {one['kept']} |"
        )
    lines += ["", "## Checks", ""]
    for check in facts["checks"]:
        verdict = "as known" if check["ok"] else f"**{check['actual']}, where it has {check['expected']}**"
        lines.append(f"- {check['set']}, {check['what']}: {verdict}")
    lines += [] if facts["checks"] else ["Nothing is known of these sets that could be checked."]
    lines += ["", "## Repetitions", "", f"- {facts['repeated']} texts repeat another one up to spacing"]
    lines.append(
        f"- {len(facts['contradicted'])} texts have copies with different answers{_some(facts['contradicted'])}"
    )
    return "\n".join([*lines, "", *_contamination(facts)]) + "\n"


def _contamination(facts: dict[str, Any]) -> list[str]:
    against, missing = facts["decontaminated_against"], facts["not_checked_against"]
    action, count = facts["contaminated"]["action"], facts["contaminated"]["problems"]
    lines = ["## Contamination", ""]
    lines.append(f"Decontaminated against: {', '.join(against) or 'nothing'}.")
    if missing:
        lines.append(
            f"**Not checked against {', '.join(missing)}**: its problems may be among these. Do not call this set "
            "decontaminated against it."
        )
    if action == "keep" and count:
        lines.append(f"**{count} contaminated problems were kept**, as asked.")
    lines += [
        "",
        "| benchmark | compared with | found in training | benchmark problems | by text, word sequences, fingerprint |",
        "|---|---|---|---|---|",
    ]
    for name, one in facts["benchmarks"].items():
        if not one["checked"]:
            lines.append(f"| {name} | nothing | not checked | | |")
            continue
        size = one["statements"] or one["fingerprints"]
        rules = ", ".join(str(one["by_rule"][rule]) for rule in ("text", "ngram", "fingerprint"))
        hit = f"{one['benchmark_problems']} of {size}"
        lines.append(f"| {name} | {one['lineage']} | {one['training_problems']} | {hit} | {rules} |")
    lines += [
        "",
        "`contaminated.jsonl` names each one. The rules find copies of a statement, also inside a longer text or with "
        "other numbers; they find no translation and no paraphrase.",
    ]
    return lines


def _some(names: list[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f": {', '.join(names[:most])}{rest}" if names else ""
