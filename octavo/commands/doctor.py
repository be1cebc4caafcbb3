"""`octavo doctor`: what this machine has and lacks, what runs on it, and what to do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.terminal.checks.finding import Finding
    from octavo.terminal.style import Style


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, its models, ports and services",
        description="Look at the machine, what is installed, the models, the OCTAVO_* variables, the ports of a cell "
        "and the services that answer, and say what to do about each. Nothing is changed. The exit code is 1 where a "
        "problem prevents serving.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything and print what was found."""
    import json
    import os
    import sys

    from octavo.home import octavo_home
    from octavo.terminal.checks.everything import check_everything
    from octavo.terminal.checks.finding import Level
    from octavo.terminal.style import Style

    findings = check_everything(octavo_home(), os.environ)
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    if args.json:
        listed = [{**vars(finding), "level": finding.level.value} for finding in findings]
        print(json.dumps({"problems": problems, "findings": listed}, indent=2))
    else:
        print(report(findings, Style(sys.stdout)))
    return 1 if problems else 0


def report(findings: Sequence[Finding], style: Style) -> str:
    """Return the findings for people: a heading a section, a line a finding, what to do below it."""
    from octavo.terminal.checks.finding import Level
    from octavo.terminal.figures import counted

    marks = {
        Level.OK: style.green("ok     "),
        Level.NOTE: style.yellow("note   "),
        Level.PROBLEM: style.red("problem"),
    }
    lines = []
    for section in dict.fromkeys(finding.section for finding in findings):
        chosen = [finding for finding in findings if finding.section == section]
        width = max(len(finding.subject) for finding in chosen)
        lines.append(style.bold(section))
        for finding in chosen:
            lines.append(f"  {marks[finding.level]}  {finding.subject.ljust(width)}  {finding.text}")
            if finding.advice:
                lines.append(f"  {' ' * 7}  {' ' * width}  {style.dim('-> ' + finding.advice)}")
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    problems, notes = counts[Level.PROBLEM], counts[Level.NOTE]
    verdict = f"{counted(problems, 'problem')}, {counted(notes, 'note')}"
    verdict += ": put right what is marked `problem` first" if problems else ": this machine can serve"
    return "\n".join([*lines, "", verdict])
