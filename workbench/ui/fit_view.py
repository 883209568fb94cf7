"""What the Fit tab shows: whether a pair will do, what a fit of it takes, and what the fit found."""

from __future__ import annotations

from typing import Any

from workbench.ui.markup import esc, notice, number, table, term
from workbench.words import ARROWS

SHOWN = (
    ("family", "family"),
    ("layers", "layers"),
    ("KV heads", "kv_heads"),
    ("head size", "head_dim"),
    ("longest context", "max_positions"),
)


def verdict_view(found: Any, have: list[str], licences: list[str], fetched: bool) -> str:
    """A `Compatibility` for people.

    Args:
        found: what the configs say.
        have: directions that have a mapper already.
        licences: of models of the catalog, if they are such.
        fetched: whether the hub was asked.
    """
    if found.compatible is None:
        more = "" if fetched else " “Check this pair” looks further."
        return notice(f"Not known yet: {found.reason}{more}")
    if not found.compatible:
        return notice(f"These two cannot be paired: {found.reason}", "warn")
    text = "These two can be paired" + (", as far as the catalog knows. " if found.by_catalog else ". ")
    if found.matched is not None:
        text += f"Their layers' caches are {'equally wide' if found.matched else 'not equally wide'}. "
    text += (
        f"Mappers are there for {' and '.join(ARROWS[way] for way in have)}."
        if have
        else "There is no mapper yet: fit one below."
    )
    if licences:
        text += f" Licence: {' / '.join(dict.fromkeys(licences))}."
    specs = (found.small, found.large)
    if None in specs:
        return notice(text)
    rows = [(label, *(esc(str(getattr(spec, name))) for spec in specs)) for label, name in SHOWN]
    return notice(text) + table(["property", "small", "large"], rows)


def estimate_view(found: Any, planned: Any, direction: str, tokens: int, top_k: int | None) -> str:
    """What the fit will take, before anything is loaded.

    Args:
        found: the `Compatibility` of the pair.
        planned: its `Plan` on this machine, None where the sizes are not known.
        direction: "up" or "down".
        tokens: that the fit will read.
        top_k: source layers a target layer, None for all or a choice.
    """
    from workbench.models.planner import gigabytes

    source = found.small if direction == "up" else found.large
    features = min(top_k or source.layers, source.layers) * source.kv_width + 1
    rows = [
        ("tokens to read", number(tokens)),
        (
            f"parameters per output ({term('p/n')}), at most",
            f"{number(features)} ({number(features / tokens)})",
        ),
    ]
    if planned is not None:
        rows += [
            ("sums in memory while fitting, at most", gigabytes(planned.fit[direction])),
            ("the mapper, at most", gigabytes(planned.mapper[direction])),
        ]
        rows += [
            (
                f"{side} model, {need.dtype}",
                f"{need.parameters / 1e9:.2f} B parameters, {gigabytes(need.weights)}",
            )
            for side, need in planned.needs.items()
        ]
    kind = "" if planned is None or planned.fits else "warn"
    sentence = notice(planned.sentence, *([kind] if kind else [])) if planned is not None else ""
    return f'<div class="kv-panel"><h2>Estimate</h2>{table(["what", "how much"], rows)}</div>{sentence}'


def report_view(gate: Any, report: Any) -> str:
    """What the fit found, with its warning."""
    rows = [
        (f"{term('gate')}", "passed"),
        (f"largest difference on {gate.tokens} tokens", number(gate.max_abs_error, 6)),
        (f"{term('R²')} of keys, {term('held out')}", number(report.r2_k)),
        (f"{term('R²')} of values, {term('held out')}", number(report.r2_v)),
        ("tokens fitted on", number(report.tokens)),
        ("tokens held out", number(report.heldout_tokens)),
        (f"parameters per output ({term('p/n')})", f"{number(report.features)} ({number(report.p_over_n)})"),
        ("time reading", f"{report.seconds['capture']:.1f} s"),
        ("time solving", f"{report.seconds['solve']:.1f} s"),
        ("peak memory of the server", f"{number(round(report.peak_rss_mb))} MB"),
    ]
    if report.polish_kl:
        rows[4:4] = [
            (f"{term('KL')} before and after polishing, {what}", " → ".join(number(kl[i]) for i in (0, -1)))
            for what, kl in (
                ("held-out text", report.polish_kl),
                ("held-out quotes", report.polish_quotes_kl),
            )
        ]
    warning = notice(report.warning, "warn") if report.warning else ""
    return warning + f'<div class="kv-panel"><h2>Fit report</h2>{table(["figure", "value"], rows)}</div>'
