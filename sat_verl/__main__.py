"""``python -m sat_verl doctor [--json]``: is this environment fit to train with SAT, and if not, what to do."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 when everything is right, 1 when something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m sat_verl", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="check versions, plug-ins (in Ray and vLLM, too), GPUs, memory, limits")
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    options = parser.parse_args(arguments)
    from sat_verl.doctor import examine, show

    findings = examine()
    show(findings, as_json=options.json)
    return 1 if any(finding.status == "fail" for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
