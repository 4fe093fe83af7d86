"""What `warpfold plan` prints of a training on several devices."""

from typing import Any

import typer

from warpfold.cli.common import show_table


def say_ranks(report: dict[str, Any]) -> None:
    """Print the devices and their links, the plan that would be chosen, the best ones, and why others were left out."""
    typer.echo(f"on {report['machine']}; {report['joined']}")
    typer.echo(f"{report['name']}: {report.get('said') or report['refused']}")
    if not report["plans"]:
        return
    sizes = ", ".join(f"{size:,} {name}" for name, size in report["sizes"].items())
    examples = report["examples"]
    typer.echo(f"\nplans of a step of {examples} example{'s' * (examples > 1)} ({sizes}; {report['rates']} rates):")
    show_table(*_table(report["plans"]), lambda row: "bold" if row[0] else "")
    if report["left_out"]:
        typer.echo("\nleft out:")
        for line in report["left_out"]:
            typer.echo(f"  {line}")


def _table(plans: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and rows of the table; what a million examples cost, or how many hours of devices they take."""
    from warpfold.cost.machine import in_gb
    from warpfold.cost.step_words import sent, step_time

    priced = plans[0]["cost_per_million"] is not None
    rows = []
    for one in plans:
        dear = one["cost_per_million"] if priced else one["device_hours_per_million"]
        memory = "-" if one["bytes"] is None else in_gb(one["bytes"])
        figures = [step_time(one["seconds"]), f"{100 * one['efficiency']:.0f} %", sent(one["sent_bytes"]), memory]
        rows.append(["->" if one["chosen"] else "", one["title"], *figures, f"{dear:,.0f}"])
    of_million = "cost of a million" if priced else "device-hours of a million"
    return ["", "plan", "a step", "efficiency", "sent by a rank", "memory", of_million], rows
