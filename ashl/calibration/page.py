"""`calibration.html`: predicted against measured, as one file that opens anywhere."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ashl.calibration.combinations import LeftOut
from ashl.calibration.compared import Verdict
from ashl.calibration.sentences import TITLES, cells, sentences
from ashl.plan.calibration import bound_of
from ashl.report.page import STYLE
from ashl.report.svg import COLORS, MARKERS, SOFT, Scale, drawing, haloed, line, marker, text, x_axis, y_axis

WIDTH, HEIGHT, LEFT, TOP, LEGEND = 940, 520, 80, 16, 200
NAMED = 1.1  # those that are further off than this have their name written beside them


def scatter(result: Verdict) -> str:
    """Steps per second: on the diagonal prediction and measurement agree; the dashes are each model's interval, about
    what its combinations have in common."""
    rates = [rate for row in result.rows for rate in (row.predicted.steps_per_s, row.measured.steps_per_s)]
    low, high = min(rates) / 1.3, max(rates) * 1.3
    across = Scale(low, high, LEFT, WIDTH - LEGEND, log=True)
    up = Scale(low, high, HEIGHT - 50, TOP, log=True)
    parts = [
        x_axis(across, HEIGHT - 50, "steps/s predicted, logarithmic", top=TOP),
        y_axis(up, LEFT, "steps/s measured, logarithmic", right=WIDTH - LEGEND),
        line(across(low), up(low), across(high), up(high), stroke=SOFT),
    ]
    models = list(result.models)
    for index, own in enumerate(result.models.values()):
        within = bound_of(own, result.overall)
        for factor in (math.exp(within) / own.common, math.exp(-within) / own.common):  # measured / predicted rate
            a, b = (factor, 1.0) if factor > 1 else (1.0, 1 / factor)
            ends = across(low * b), up(low * a), across(high / a), up(high / b)
            parts.append(line(*ends, stroke=COLORS[index % len(COLORS)], stroke_dasharray="3 3"))
    for row in result.rows:
        style = models.index(row.model) % len(COLORS)
        x, y = across(row.predicted.steps_per_s), up(row.measured.steps_per_s)
        parts.append(marker(MARKERS[style], x, y, COLORS[style], 5.0))
        if not 1 / NAMED < row.ratio < NAMED:
            parts.append(haloed(x + 8, y + 4, f"{row.name} ({row.component})", 3))
    for index, model in enumerate(models):
        y = TOP + 14 + 22 * index
        parts.append(marker(MARKERS[index % len(COLORS)], WIDTH - LEGEND + 34, y, COLORS[index % len(COLORS)], 5.0))
        parts.append(text(WIDTH - LEGEND + 48, y + 4, model))
    return drawing(WIDTH, HEIGHT, "predicted and measured steps per second", *parts)


def page(result: Verdict, left_out: Sequence[LeftOut], record: Mapping[str, Any], command: str) -> str:
    """The whole page."""
    words = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences(result, len(result.rows)))
    head = "".join(f"<th>{escape(title)}</th>" for title in TITLES)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) + "</tr>" for row in result.rows)
    out = "".join(f"<li><code>{escape(own.name)}</code> {escape(own.reason)}</li>" for own in left_out)
    made = ", ".join([str(record["made"]), *(f"{name} {version}" for name, version in record["versions"].items())])
    body = [
        "<h1>ashl: predicted and measured</h1>",
        f'<div class="answer">{words}</div>',
        f"<section><h2>Steps per second</h2>{scatter(result)}"
        '<p class="note">Above the line the cluster was faster than predicted; what is off by 10 % is named. '
        "Between a model's dashes lies what is foretold of it, with what its combinations have in common.</p>"
        "</section>",
        f'<section><h2>Combinations</h2><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>",
        f"<section><h2>Left out ({len(left_out)})</h2><ul>{out}</ul></section>" if out else "",
        f"<section><h2>How this was made</h2><p><code>{escape(command)}</code></p><p>{escape(made)}</p></section>",
    ]
    top = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>ashl: calibration</title>'
    whole = f'<!DOCTYPE html>\n<html lang="en"><head>{top}<style>{STYLE}</style></head>'
    return whole + "\n<body>\n" + "\n".join(filter(None, body)) + "\n</body></html>\n"
