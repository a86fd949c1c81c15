"""The part of the page about a run that says whether it learnt what it was not shown."""

from .charts import Curve, render_bar_chart, render_line_chart
from .report_figures import MetricLines, get_last_value, find_metric_names, select_series

TIMESTEP_PREFIX = "validation/time/"


def render_validation(lines: MetricLines) -> str:
    """Empty for a run without validation."""
    losses = select_series(lines, "validation/loss")
    if not losses:
        return ""
    base, gains = select_series(lines, "validation/base"), select_series(lines, "validation/gain")
    off = dict(select_series(lines, "validation/gain_interval"))
    lower, upper = ([(step, gain + sign * off[step]) for step, gain in gains if step in off] for sign in (-1, 1))
    charts = {
        "Loss on pictures that are not trained": render_line_chart([Curve("with the LoRA", losses), Curve("base model", base)]),
        "Gain over the base model, with its 95 % interval": render_line_chart(
            [Curve("lower end", lower, is_faint=True), Curve("upper end", upper, is_faint=True), Curve("gain", gains)]),
        "By the quantile of the time": render_bar_chart(
            {name.removeprefix(TIMESTEP_PREFIX): [get_last_value(lines, name.replace("validation/", "validation/base/")), get_last_value(lines, name)]
             for name in find_metric_names(lines, TIMESTEP_PREFIX)}, ("base model", "with the LoRA")),
        "By dataset": render_line_chart([Curve(name.removeprefix("validation/"), select_series(lines, name))
                              for name in find_metric_names(lines, "validation/dataset/")]),
    }  # fmt: skip
    shown = "".join(f"<div><h3>{title}</h3>{chart}</div>" for title, chart in charts.items() if chart)
    return f"<h2>Validation</h2><p class=facts>{_format_result(lines)}</p><div class=charts>{shown}</div>"


def _format_result(lines: MetricLines) -> str:
    step, gain = select_series(lines, "validation/gain")[-1]
    off, loss = get_last_value(lines, "validation/gain_interval"), get_last_value(lines, "validation/loss")
    said = f"after step {step}: loss {loss:.5g}, {abs(gain):.3g} {'below' if gain >= 0 else 'above'} the base model's"
    if off is None:
        return said
    if abs(gain) <= off:
        return f"{said}, which is within the interval of +- {off:.2g}: not to be told from it"
    return f"{said}, by more than the interval of +- {off:.2g}: {'better' if gain > 0 else 'worse'} than the base model"
