"""`python -m benchmarks`: measure the current commit, publish, and say what differs.

commands, each with a --help of its own:
  compare BASE NEW     tell what one version changed against another, and how sure that is
  history --commits N  measure earlier commits with today's suite
  machine              say under which name results are filed here
  --smoke              try the suite out on one small model, in a minute; nothing is kept

for example:
  python -m benchmarks --bench "Latency.*resnet18"
  python -m benchmarks compare HEAD~1 HEAD
  python -m benchmarks history --commits 12
  python -m benchmarks machine
  python -m benchmarks --smoke

beside it:
  python -m benchmarks.peers --help  measure other tools
  python -m benchmarks.summary       print the newest results as a table
  asv publish                        build the dashboard again
"""

from __future__ import annotations

import argparse
import sys

from ._machine import machine_name


def main(arguments: list[str]) -> int:
    try:
        return _run(arguments)
    except ModuleNotFoundError as error:
        if arguments in (["-h"], ["--help"]):
            print(__doc__)
            return 0
        print(
            f"error: {error.name} is not installed: `python -m tox run -e bench` installs all that"
            " the benchmarks need, and runs them",
            file=sys.stderr,
        )
        return 2


def _run(arguments: list[str]) -> int:
    name, rest = (arguments or [""])[0], arguments[1:]
    if name == "compare":
        from .compare.command import main as compare

        return compare(rest)
    if name == "history":
        from .history import main as history

        return history(rest)
    if name == "machine":
        _refuse_any(name, "Say under which name results are filed here.", rest)
        print(machine_name())
        return 0
    if name == "--smoke":
        from .smoke import MODEL
        from .smoke import main as smoke

        _refuse_any(name, f"Try the suite out on {MODEL}, and keep nothing.", rest)
        return smoke()
    from .measuring import main as measure

    return measure(arguments, commands=(__doc__ or "").partition("\n\n")[2])


def _refuse_any(name: str, about: str, rest: list[str]) -> None:
    argparse.ArgumentParser(f"python -m benchmarks {name}", description=about).parse_args(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
