"""A plan on the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from recipes.plan.build import Plan, room
from recipes.plan.gpus import GPUS
from recipes.plan.quantities import Range, Row, count, size, total

_COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "red"}


def span(value: Range, form: str = "{:.3g}") -> str:
    """A range in words; one number where both ends read the same."""
    low, high = form.format(value.low), form.format(value.high)
    return low if low == high else f"{low} to {high}"


def amount(value: Range) -> str:
    """A range of dollars or hours in words."""
    return span(value, "{:,.0f}" if value.low >= 10 else "{:,.2f}")


def sizes(value: Range) -> str:
    """A range of bytes in words."""
    low, high = size(value.low), size(value.high)
    return low if low == high else f"{low} to {high}"


def _seconds(value: float) -> str:
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60)):
        if value >= 2 * scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} s"


def seconds(value: Range) -> str:
    """A range of seconds in words."""
    low, high = _seconds(value.low), _seconds(value.high)
    return low if low == high else f"{low} to {high}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "size")
    return table


def _memory(title: str, groups: Iterable[tuple[str, tuple[Row, ...]]], *, sources: bool) -> Table:
    table = _table(title, "what", "size", "formula", *(["after"] if sources else []))
    for name, rows in groups:
        for row in rows:
            table.add_row(row.name, sizes(row.size), row.formula, *([row.source] if sources else []))
        table.add_row(f"[bold]{name}", f"[bold]{sizes(total(rows))}", end_section=True)
    return table


def _model(plan: Plan) -> str:
    model, parts = plan.model, plan.model.parameters
    kinds = {
        "embedding": parts.embedding, "attention": parts.attention, "MLP": parts.mlp, "experts": parts.experts,
        "routers": parts.router, "norms": parts.norm, "lm head": parts.lm_head,
    }  # fmt: skip
    words = ", ".join(f"{name} {count(number)}" for name, number in kinds.items() if number)
    tied = " (the embedding is the lm head)" if model.tied else ""
    return f"{count(parts.total)} parameters, {count(model.active)} active: {words}{tied}; from {model.source}"


def _work(plan: Plan) -> Table:
    work = plan.work
    table = _table("samples and arithmetic", "case", "prompt + response", "tokens trained / step", "generated / step",
                   "generated in all", "PFLOP / step")  # fmt: skip
    for name, case in work.cases.items():
        lengths = case.lengths
        table.add_row(
            name, f"{lengths.prompt:.0f} + {lengths.response:.0f}", count(case.trained), count(case.generated),
            count(case.generated * work.steps), f"{case.flops / 1e15:.3g}",
        )  # fmt: skip
    return table


def _passes(plan: Plan) -> str:
    return ", ".join(f"{one.name} {one.forwards:g} ({one.reason})" for one in plan.work.passes)


def _verdicts(plan: Plan) -> Table:
    table = _table("GPU types", "type", "memory", "trainer", "rollout")
    for one in plan.verdicts:
        words = [f"[{_COLOURS[text]}]{text}" for text in (one.trainer, one.rollout)]
        table.add_row(one.gpu + (" *" if one.gpu == plan.gpu.name else ""), size(GPUS[one.gpu].memory), *words)
    return table


def _time(plan: Plan) -> Table | None:
    time, settings = plan.time, plan.settings
    if time is None:
        return None
    table = _table(f"time and cost on {plan.gpu.title}, at the expected lengths", "what", "value", "how")
    share = f"{plan.trainer.ranks} x {plan.gpu.tflops:.0f} TFLOPS x {span(settings.train_mfu)}"
    decoding = (
        f"decoding at {span(settings.decode_efficiency)} of bandwidth and arithmetic, "
        f"{span(settings.step_floor_ms)} ms a step at least, and the longest response alone"
    )
    servers = f"{span(time.running, '{:.0f}')} sequences at once on each of {plan.rollout.replicas} servers"
    overlap = "trainer, rollout and weight sync in turn"
    if time.hidden.high:
        hidden = f"overlap hides {time.hidden.low:.0%} to {time.hidden.high:.0%} of both"
        overlap = f"bottleneck: {time.bottleneck}; {hidden}"
    validations = "without validations: how many problems they have is not known"
    if time.validation is not None:
        validations = f"{plan.work.validations} validations, {seconds(time.validation)}"
    gpus = "one GPU for both" if plan.rollout.shared else f"{plan.trainer.ranks} + {plan.rollout.gpus} GPUs"
    rows = [
        ("trainer, per step", seconds(time.train), f"arithmetic / ({share})"),
        ("rollout, per step", seconds(time.generate), decoding),
        ("rollout, tokens/s", span(time.tokens_per_s, "{:.0f}"), servers),
        ("weight sync, per step", seconds(time.sync), f"{span(settings.sync_gb_per_s)} GB/s"),
        ("one step", seconds(time.step), overlap),
        ("one step, any length", seconds(time.step_any), "from low to high lengths"),
        ("one step, all at the limit", seconds(time.step_limit), "every response cut off"),
        ("the run", seconds(time.run), f"{plan.work.steps} steps, {validations}"),
        ("GPU hours", amount(time.gpu_hours), gpus),
    ]
    if time.cost is not None and settings.price is not None:
        rows.append(
            ("cost", "$" + amount(time.cost), f"${span(settings.price)} per GPU and hour (plan.price_per_gpu_hour)")
        )
    for row in rows:
        table.add_row(*row)
    return table


def _comparison(console: Console, plan: Plan) -> None:
    found = plan.comparison
    if found is None:
        console.print("baseline  none: this arm is one itself", highlight=False)
        return
    if not found.differences:
        console.print(f"baseline  {found.arm}: no setting differs", highlight=False)
    title = f"differences from the baseline: {found.arm}"
    table = _table(title, "setting", "run", "baseline", *(["remark"] if found.others else []))
    for one in found.differences:
        remark = "" if one.method else "[red]not of a method"
        table.add_row(one.setting, str(one.run), str(one.baseline), *([remark] if found.others else []))
    if found.differences:
        console.print(table)
    for words in found.left_out:
        console.print(f"the baseline goes without {words}", highlight=False)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _memory_of_both(console: Console, plan: Plan) -> None:
    """The rows of a GPU of each side, and of the host."""
    memory, own, sources = plan.trainer_memory, plan.rollout_memory, console.width >= 140  # plan.json has them as well
    console.print(_memory(memory.title, (("standing", memory.standing), *memory.phases.items()), sources=sources))
    _say(console, f"peak      {sizes(memory.peak)} of {size(room(plan.rollout, plan.gpu))}")
    groups = (("beside the KV cache", own.rows), ("outside gpu_memory_utilization, at a weight sync", own.worker))
    console.print(_memory("a GPU that generates", groups, sources=sources))
    _say(
        console,
        f"KV cache  {sizes(own.cache)} at gpu_memory_utilization {plan.rollout.utilization}, {own.token} B a token: "
        f"{span(own.tokens, '{:.0f}')} tokens, {span(own.full, '{:.1f}')} sequences of {plan.rollout.length}, "
        f"{span(own.running, '{:.0f}')} of the assumed lengths at once of {own.needed} in a window",
    )
    title = "host memory of a node that trains and holds TransferQueue"
    console.print(_memory(title, (("together", plan.host),), sources=sources))
    _say(console, f"checkpoint  {sizes(plan.checkpoint.size)} on disk: {plan.checkpoint.formula}")
    console.print(_verdicts(plan))
    if plan.remedies:
        table = _table(f"what would help on {plan.gpu.title}, one on top of the other", "overrides", "costs", "peak")
        for one in plan.remedies:
            table.add_row(one.settings, one.price, sizes(one.peak))
        console.print(table)


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    name = ", ".join(f"{key} {value}" for key, value in plan.run.items())
    _say(console, f"[bold]plan[/]      {name}")
    _say(console, f"model     {plan.model.name}: {_model(plan)}")
    _say(console, f"trainer   {plan.trainer.sizes()}")
    _say(console, f"rollout   {plan.rollout.engine}: {plan.rollout.replicas} servers of TP {plan.rollout.tensor}")
    _memory_of_both(console, plan)
    if plan.routes is not None:
        response, step = plan.routes
        _say(console, f"routes    at most {size(response)} a response, {size(step)} an optimizer step")
    console.print(_work(plan))
    _say(console, f"passes    {_passes(plan)} (in forward passes of the batch)")
    if (time := _time(plan)) is not None:
        console.print(time)
    _comparison(console, plan)
    for note in plan.notes:
        _say(console, f"[yellow]note[/]      {note}")
    _say(console, "Estimates from formulas; no GPU run stands behind them (recipes/plan/README.md).")
