"""The part of the page about a run that says whether it learnt what it was not shown."""

from .charts import Line, bars, curves
from .report_figures import Metrics, last, names, series

TIMES = "validation/time/"


def validation(lines: Metrics) -> str:
    """Empty for a run without validation."""
    losses = series(lines, "validation/loss")
    if not losses:
        return ""
    base, gains = series(lines, "validation/base"), series(lines, "validation/gain")
    off = dict(series(lines, "validation/gain_interval"))
    lower, upper = ([(step, gain + sign * off[step]) for step, gain in gains if step in off] for sign in (-1, 1))
    charts = {
        "Loss on pictures that are not trained": curves([Line("with the LoRA", losses), Line("base model", base)]),
        "Gain over the base model, with its 95 % interval": curves(
            [Line("lower end", lower, is_faint=True), Line("upper end", upper, is_faint=True), Line("gain", gains)]),
        "By the quantile of the time": bars(
            {name.removeprefix(TIMES): [last(lines, name.replace("validation/", "validation/base/")), last(lines, name)]
             for name in names(lines, TIMES)}, ("base model", "with the LoRA")),
        "By dataset": curves([Line(name.removeprefix("validation/"), series(lines, name))
                              for name in names(lines, "validation/dataset/")]),
    }  # fmt: skip
    shown = "".join(f"<div><h3>{title}</h3>{chart}</div>" for title, chart in charts.items() if chart)
    return f"<h2>Validation</h2><p class=facts>{_verdict(lines)}</p><div class=charts>{shown}</div>"


def _verdict(lines: Metrics) -> str:
    step, gain = series(lines, "validation/gain")[-1]
    off, loss = last(lines, "validation/gain_interval"), last(lines, "validation/loss")
    said = f"after step {step}: loss {loss:.5g}, {abs(gain):.3g} {'below' if gain >= 0 else 'above'} the base model's"
    if off is None:
        return said
    if abs(gain) <= off:
        return f"{said}, which is within the interval of +- {off:.2g}: not to be told from it"
    return f"{said}, by more than the interval of +- {off:.2g}: {'better' if gain > 0 else 'worse'} than the base model"
